// Elementwise operations and reductions with the loops of NumPy's ufuncs, for the same bits.

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "tape.h"

namespace fl::tape {
namespace {

// Number of elements of a strip. A few strips fit into the first-level cache.
constexpr intptr_t STRIP = 2048;
// Maximum number of elements of a vector. NumPy gives NaNs other bits in a loop's last, partial vector.
constexpr intptr_t VECTOR = 64;
// Up to this row length in elements, the call of a loop takes longer than the loop.
constexpr intptr_t SHORT = 128;

// True if the rows of all operands are adjacent, so that one loop covers them.
bool is_flat(const Elementwise& op, intptr_t columns) {
  for (int i = 0; i < op.operands; ++i) {
    if (op.steps[i][0] != columns * op.steps[i][1]) return false;
  }
  return true;
}

// A group of operations over rows, block by block. A block has as many rows as fit into a strip.
class Rows final : public Instruction {
 public:
  Rows(std::vector<Elementwise> operations, intptr_t rows, intptr_t columns)
      : operations_(std::move(operations)), rows_(rows), columns_(columns) {
    const intptr_t whole = VECTOR / std::gcd(VECTOR, columns);  // number of rows that fill whole vectors
    const intptr_t most = std::max<intptr_t>(1, STRIP / columns);
    block_ = std::min(rows, most < whole ? most : most / whole * whole);
    for (Elementwise& op : operations_) {
      if (columns <= SHORT) lay_out(&op);
      flat_.push_back(is_flat(op, columns));
    }
    if (operations_.size() == 1 && tiles_.empty()) block_ = rows;
  }

  Outcome run(Table table) override {
    for (const Tile& tile : tiles_) fill(tile, table[tile.at]);
    const Elementwise& last = operations_.back();
    if (last.sums) {
      char* to = table[last.at[1]];
      last.itemsize[1] == sizeof(double) ? sum<double>(table, to) : sum<float>(table, to);
      return Outcome::done;
    }
    for (intptr_t from = 0; from < rows_; from += block_) {
      const intptr_t rows = std::min(block_, rows_ - from);
      for (size_t i = 0; i < operations_.size(); ++i) run_block(table, i, from, rows);
    }
    return Outcome::done;
  }

  int64_t work() const override { return rows_ * columns_ * int64_t(operations_.size()); }

 private:
  template <typename R>
  void sum(Table table, char* to) const {
    const R all = R(0) + sum_of<R>(table, 0, rows_);
    std::memcpy(to, &all, sizeof(R));
  }

  // Return the sum of elements [from, from + count) in NumPy's order: add the sums of two halves,
  // recursively. Elements that the group computes are summed strip by strip. The compiler determines which
  // NaN a sum of two NaNs gives.
  template <typename R>
  R sum_of(Table table, intptr_t from, intptr_t count) const {
    const size_t last_index = operations_.size() - 1;
    if (count > STRIP && last_index > 0) {
      const intptr_t half = count / 16 * 8;
      const R first = sum_of<R>(table, from, half);
      return first + sum_of<R>(table, from + half, count - half);
    }
    for (size_t i = 0; i < last_index; ++i) run_block(table, i, from, count);
    const Elementwise& op = operations_[last_index];
    R total = 0;
    char* to = reinterpret_cast<char*>(&total);
    char* args[] = {to, table[op.at[0]] + from * op.ahead(0), to};
    const intptr_t steps[] = {0, op.steps[0][0], 0};
    op.loop(args, &count, steps, op.data);
    return total;
  }

  void run_block(Table table, size_t number, intptr_t from, intptr_t rows) const {
    const Elementwise& op = operations_[number];
    char* args[MOST_OPERANDS];
    intptr_t steps[MOST_OPERANDS];
    for (int i = 0; i < op.operands; ++i) {
      steps[i] = op.steps[i][1];
      args[i] = op.at[i] < 0 ? tiles_[static_cast<size_t>(-1 - op.at[i])].room->data()
                             : table[op.at[i]] + from * op.ahead(i);
    }
    const intptr_t count = flat_[number] ? rows * columns_ : columns_;
    for (intptr_t row = 0; row < (flat_[number] ? 1 : rows); ++row) {
      op.loop(args, &count, steps, op.data);
      for (int i = 0; i < op.operands; ++i) args[i] += op.steps[i][0];
    }
  }

  // A one-row operand, such as a bias, repeated as often as a block has rows.
  struct Tile {
    int at;
    intptr_t step, itemsize;
    std::unique_ptr<std::vector<char>> room;
  };

  // If rows are short, repeat each one-row operand for all rows of a block. Then one loop call computes the
  // block, because one call per row would take longer than the elements.
  void lay_out(Elementwise* op) {
    for (int i = 0; i + 1 < op->operands; ++i) {
      const intptr_t step = op->steps[i][1];
      if (op->steps[i][0] != 0 || step <= 0 || op->at[i] < 0) continue;
      const size_t bytes = static_cast<size_t>(block_ * columns_ * step);
      tiles_.push_back({op->at[i], step, op->itemsize[i], std::make_unique<std::vector<char>>(bytes)});
      op->at[i] = -static_cast<int>(tiles_.size());
      op->steps[i][0] = columns_ * step;
    }
  }

  void fill(const Tile& tile, const char* row) const {
    const intptr_t next = columns_ * tile.step;
    const size_t bytes = static_cast<size_t>(next - tile.step + tile.itemsize);  // no gap after the last row
    for (intptr_t i = 0; i < block_; ++i) std::memcpy(tile.room->data() + i * next, row, bytes);
  }

  std::vector<Elementwise> operations_;
  std::vector<Tile> tiles_;
  std::vector<char> flat_;
  intptr_t rows_, columns_, block_;
};

// One operation over any number of dimensions; the last is the innermost.
class ManyDimensions final : public Instruction {
 public:
  ManyDimensions(const Elementwise& operation, const std::vector<intptr_t>& dimensions)
      : op_(operation), dimensions_(dimensions) {}

  Outcome run(Table table) override {
    char* args[MOST_OPERANDS];
    for (int i = 0; i < op_.operands; ++i) args[i] = table[op_.at[i]];
    walk(0, args);
    return Outcome::done;
  }

  int64_t work() const override {
    return std::accumulate(dimensions_.begin(), dimensions_.end(), int64_t(1), std::multiplies<>());
  }

 private:
  void walk(size_t dimension, char* const* from) const {
    char* args[MOST_OPERANDS];
    intptr_t steps[MOST_OPERANDS];
    for (int i = 0; i < op_.operands; ++i) {
      args[i] = from[i];
      steps[i] = op_.steps[i][dimension];
    }
    if (dimension + 1 == dimensions_.size()) {
      op_.loop(args, &dimensions_[dimension], steps, op_.data);
      return;
    }
    for (intptr_t n = 0; n < dimensions_[dimension]; ++n) {
      walk(dimension + 1, args);
      for (int i = 0; i < op_.operands; ++i) args[i] += steps[i];
    }
  }

  Elementwise op_;
  std::vector<intptr_t> dimensions_;
};

}  // namespace

std::unique_ptr<Instruction> group(std::vector<Elementwise> operations, const std::vector<intptr_t>& dimensions) {
  const size_t count = dimensions.size();
  if (count > 2) return std::make_unique<ManyDimensions>(operations[0], dimensions);
  if (count == 2) return std::make_unique<Rows>(std::move(operations), dimensions[0], dimensions[1]);
  for (Elementwise& op : operations) {  // one element per row
    for (auto& steps : op.steps) steps[1] = steps[0];
  }
  return std::make_unique<Rows>(std::move(operations), dimensions[0], 1);
}

Outcome Reduction::run(Table table) {
  char *source = table[from], *target = table[to];
  const intptr_t row_step = columns * itemsize, next = along_rows ? row_step : itemsize;
  for (intptr_t i = 0; i < (along_rows ? rows : columns); ++i) {
    std::memcpy(target + i * itemsize, initial == nullptr ? source + i * next : initial,
                static_cast<size_t>(itemsize));
  }
  // Without an initial value, results already contain the first element of each row, or the first row.
  const intptr_t taken = initial == nullptr, first = along_rows ? taken : 0;
  const intptr_t count = columns - first, step = along_rows ? 0 : itemsize;
  const intptr_t steps[] = {step, itemsize, step};
  for (intptr_t row = taken - first; count > 0 && row < rows; ++row) {
    char* into = target + (along_rows ? row * itemsize : 0);
    char* args[] = {into, source + row * row_step + first * itemsize, into};
    loop(args, &count, steps, data);
  }
  return Outcome::done;
}

}  // namespace fl::tape

// Elementwise operations and reductions by the loops inside NumPy's ufuncs: the same bits.

#include <algorithm>
#include <cstring>

#include "tape.h"

namespace fl::tape {
namespace {

// Elements of a strip: a few operands of it stay in the first cache.
constexpr intptr_t STRIP = 2048;
// Elements of a row that is so short that calling a loop takes longer.
constexpr intptr_t SHORT = 128;

// Whether the operand's rows follow each other without a gap, so that all are one loop.
bool is_flat(const Elementwise& op, intptr_t columns) {
  for (int i = 0; i < op.operands; ++i) {
    if (op.steps[i][0] != columns * op.steps[i][1]) return false;
  }
  return true;
}

class OneDimension final : public Instruction {
 public:
  OneDimension(std::vector<Elementwise> operations, intptr_t count)
      : operations_(std::move(operations)), count_(count) {}

  Outcome run(Table table) override {
    for (intptr_t from = 0; from < count_; from += strip()) {
      const intptr_t count = std::min(strip(), count_ - from);
      for (const Elementwise& op : operations_) {
        char* args[MOST_OPERANDS];
        intptr_t steps[MOST_OPERANDS];
        for (int i = 0; i < op.operands; ++i) {
          steps[i] = op.steps[i][0];
          args[i] = table[op.at[i]] + from * steps[i];
        }
        op.loop(args, &count, steps, op.data);
      }
    }
    return Outcome::done;
  }

  int64_t work() const override { return count_ * static_cast<int64_t>(operations_.size()); }

 private:
  intptr_t strip() const { return operations_.size() == 1 ? count_ : STRIP; }

  std::vector<Elementwise> operations_;
  intptr_t count_;
};

class TwoDimensions final : public Instruction {
 public:
  TwoDimensions(std::vector<Elementwise> operations, intptr_t rows, intptr_t columns)
      : operations_(std::move(operations)), rows_(rows), columns_(columns) {
    block_ = std::min(rows, std::max<intptr_t>(1, STRIP / columns));
    for (Elementwise& op : operations_) {
      if (columns <= SHORT) lay_out(&op);
      flat_.push_back(is_flat(op, columns));
    }
    if (operations_.size() == 1 && tiles_.empty()) block_ = rows;
  }

  Outcome run(Table table) override {
    for (const Tile& tile : tiles_) fill(tile, table[tile.at]);
    for (intptr_t from = 0; from < rows_; from += block_) {
      const intptr_t rows = std::min(block_, rows_ - from);
      for (size_t i = 0; i < operations_.size(); ++i) run_block(table, i, from, rows);
    }
    return Outcome::done;
  }

  int64_t work() const override {
    return rows_ * columns_ * static_cast<int64_t>(operations_.size());
  }

 private:
  void run_block(Table table, size_t number, intptr_t from, intptr_t rows) const {
    const Elementwise& op = operations_[number];
    char* args[MOST_OPERANDS];
    intptr_t steps[MOST_OPERANDS];
    for (int i = 0; i < op.operands; ++i) {
      steps[i] = op.steps[i][1];
      args[i] = op.at[i] < 0 ? tiles_[static_cast<size_t>(-1 - op.at[i])].room->data()
                             : table[op.at[i]] + from * op.steps[i][0];
    }
    const intptr_t count = flat_[number] ? rows * columns_ : columns_;
    for (intptr_t row = 0; row < (flat_[number] ? 1 : rows); ++row) {
      op.loop(args, &count, steps, op.data);
      for (int i = 0; i < op.operands; ++i) args[i] += op.steps[i][0];
    }
  }

  // A row that is the same for all rows, such as a bias, and room for it as often as a block has rows.
  struct Tile {
    int at;
    intptr_t step, itemsize;
    std::unique_ptr<std::vector<char>> room;
  };

  // Where rows are short, give each operand that is one row as many as a block has: then the block is
  // one loop, and a call for each row would take longer than its elements.
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
    const size_t bytes = static_cast<size_t>(next - tile.step + tile.itemsize);  // no gap at the end
    for (intptr_t i = 0; i < block_; ++i) std::memcpy(tile.room->data() + i * next, row, bytes);
  }

  std::vector<Elementwise> operations_;
  std::vector<Tile> tiles_;
  std::vector<char> flat_;
  intptr_t rows_, columns_, block_;
};

// One operation over any number of dimensions, of which the last is the inner one.
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
    int64_t count = 1;
    for (intptr_t extent : dimensions_) count *= extent;
    return count;
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

class Reduce final : public Instruction {
 public:
  explicit Reduce(const Reduction& reduction) : r_(reduction) {}

  Outcome run(Table table) override {
    if (r_.along_rows) {
      along_rows(table[r_.from], table[r_.to]);
    } else {
      down_columns(table[r_.from], table[r_.to]);
    }
    return Outcome::done;
  }

  int64_t work() const override { return r_.rows * r_.columns; }

 private:
  void along_rows(char* from, char* to) const {
    const intptr_t first = r_.initial == nullptr, count = r_.columns - first;
    const intptr_t steps[] = {0, r_.column_step, 0};
    for (intptr_t row = 0; row < r_.rows; ++row) {
      std::memcpy(to, first ? from : r_.initial, static_cast<size_t>(r_.itemsize));
      char* args[] = {to, from + first * r_.column_step, to};
      if (count > 0) r_.loop(args, &count, steps, r_.data);
      from += r_.row_step;
      to += r_.result_step;
    }
  }

  void down_columns(char* from, char* to) const {
    const intptr_t first = r_.initial == nullptr;
    for (intptr_t column = 0; column < r_.columns; ++column) {
      std::memcpy(to + column * r_.result_step, first ? from + column * r_.column_step : r_.initial,
                  static_cast<size_t>(r_.itemsize));
    }
    const intptr_t steps[] = {r_.result_step, r_.column_step, r_.result_step};
    for (intptr_t row = first; row < r_.rows; ++row) {
      char* args[] = {to, from + row * r_.row_step, to};
      r_.loop(args, &r_.columns, steps, r_.data);
    }
  }

  Reduction r_;
};

}  // namespace

std::unique_ptr<Instruction> group(std::vector<Elementwise> operations,
                                   const std::vector<intptr_t>& dimensions) {
  if (dimensions.size() == 1) {
    return std::make_unique<OneDimension>(std::move(operations), dimensions[0]);
  }
  if (dimensions.size() == 2) {
    return std::make_unique<TwoDimensions>(std::move(operations), dimensions[0], dimensions[1]);
  }
  return std::make_unique<ManyDimensions>(operations[0], dimensions);
}

std::unique_ptr<Instruction> reduce(const Reduction& reduction) {
  return std::make_unique<Reduce>(reduction);
}

}  // namespace fl::tape

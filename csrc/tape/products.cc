// Matrix products by the BLAS that NumPy has loaded, as NumPy calls it, and what it adds up without BLAS:
// the same bits.

#include <cstring>
#include <type_traits>

#include "tape.h"

namespace fl::tape {

Blas blas;

namespace {

#define FL_KERNELS "csrc/tape/products.inc"
#include "../common/each_set.inc"

enum { ROW_MAJOR = 101, COLUMN_MAJOR = 102, AS_IT_IS = 111 };  // as cblas.h has them; 112 is transposed

template <typename R>
R* at(Table table, int entry) {
  return reinterpret_cast<R*>(table[entry]);
}

template <typename R, typename Int>
void call(const Gemm& g, Table table) {
  using Function = void (*)(int order, int a, int b, Int m, Int n, Int k, R alpha, const R*, Int, const R*,
                            Int, R beta, R*, Int);
  reinterpret_cast<Function>(blas.gemm[std::is_same_v<R, double>])(
      ROW_MAJOR, AS_IT_IS + g.transposed_a, AS_IT_IS + g.transposed_b, Int(g.m), Int(g.n), Int(g.k), 1,
      at<R>(table, g.a), Int(g.a_step), at<R>(table, g.b), Int(g.b_step), 0, at<R>(table, g.c), Int(g.n));
}

template <typename R, typename Int>
void call(const Gemv& g, Table table) {
  using Function = void (*)(int order, int transposed, Int rows, Int columns, R alpha, const R*, Int,
                            const R*, Int, R beta, R*, Int);
  reinterpret_cast<Function>(blas.gemv[std::is_same_v<R, double>])(
      g.row_major ? ROW_MAJOR : COLUMN_MAJOR, AS_IT_IS + g.transposed, Int(g.rows), Int(g.columns), 1,
      at<R>(table, g.matrix), Int(g.matrix_step), at<R>(table, g.x), Int(g.x_step), 0, at<R>(table, g.y), 1);
}

template <typename R, typename Int>
void call(const Dot& d, Table table) {
  using Function = R (*)(Int count, const R*, Int, const R*, Int);
  *at<R>(table, d.to) = reinterpret_cast<Function>(blas.dot[std::is_same_v<R, double>])(
      Int(d.count), at<R>(table, d.x), Int(d.x_step), at<R>(table, d.y), Int(d.y_step));
}

// Where there is nothing to add up BLAS has no order of its own, and takes four times as long.
template <typename R, typename Int>
void call(const Outer& o, Table table) {
  static const auto kernel = FL_CHOSEN(outer<R>);
  kernel(o.m, o.n, at<R>(table, o.a), o.a_step, at<R>(table, o.b), at<R>(table, o.c), o.scalar);
}

template <typename R, typename Int>
void call(const RowSum& s, Table table) {
  static const auto kernel = FL_CHOSEN(add_rows<R>);
  kernel(at<R>(table, s.from), s.rows, s.columns, at<R>(table, s.to));
}

int64_t work_of(const Gemm& g) { return g.m * g.n * g.k / 8 + 1; }
int64_t work_of(const Gemv& g) { return g.rows * g.columns / 4 + 1; }
int64_t work_of(const Dot& d) { return d.count / 4 + 1; }
int64_t work_of(const Outer& o) { return o.m * o.n; }
int64_t work_of(const RowSum& s) { return s.rows * s.columns; }

template <typename Kind>
class Product final : public Instruction {
 public:
  explicit Product(const Kind& kind) : kind_(kind) {
    constexpr Run is_long[] = {call<float, int64_t>, call<double, int64_t>};
    constexpr Run is_short[] = {call<float, int>, call<double, int>};
    run_ = (blas.is_long ? is_long : is_short)[kind.is_double];
  }
  Outcome run(Table table) override {
    run_(kind_, table);
    return Outcome::done;
  }
  int64_t work() const override { return work_of(kind_); }

 private:
  using Run = void (*)(const Kind&, Table);
  Kind kind_;
  Run run_;
};

}  // namespace

template <typename Kind>
std::unique_ptr<Instruction> product(const Kind& kind) {
  return std::make_unique<Product<Kind>>(kind);
}
template std::unique_ptr<Instruction> product(const Gemm&);
template std::unique_ptr<Instruction> product(const Gemv&);
template std::unique_ptr<Instruction> product(const Dot&);
template std::unique_ptr<Instruction> product(const Outer&);
template std::unique_ptr<Instruction> product(const RowSum&);

}  // namespace fl::tape

#include "products.h"

#include <cstring>
#include <type_traits>

namespace fl::tape {

Blas blas;

namespace {

template <typename R, typename Int>
using GemmOf = void (*)(int order, int a, int b, Int m, Int n, Int k, R alpha, const R*, Int, const R*, Int,
                        R beta, R*, Int);
template <typename R, typename Int>
using GemvOf = void (*)(int order, int transposed, Int rows, Int columns, R alpha, const R*, Int, const R*,
                        Int, R beta, R*, Int);
template <typename R, typename Int>
using DotOf = R (*)(Int count, const R*, Int, const R*, Int);

template <typename R, typename Int>
void call(const Gemm& g, Table table) {
  const auto function = reinterpret_cast<GemmOf<R, Int>>(blas.gemm[std::is_same_v<R, double>]);
  function(ROW_MAJOR, g.transposed_a, g.transposed_b, static_cast<Int>(g.m), static_cast<Int>(g.n),
           static_cast<Int>(g.k), 1, reinterpret_cast<R*>(table[g.a]), static_cast<Int>(g.a_step),
           reinterpret_cast<R*>(table[g.b]), static_cast<Int>(g.b_step), 0,
           reinterpret_cast<R*>(table[g.c]), static_cast<Int>(g.c_step));
}

template <typename R, typename Int>
void call(const Gemv& g, Table table) {
  const auto function = reinterpret_cast<GemvOf<R, Int>>(blas.gemv[std::is_same_v<R, double>]);
  function(g.order, g.transposed, static_cast<Int>(g.rows), static_cast<Int>(g.columns), 1,
           reinterpret_cast<R*>(table[g.matrix]), static_cast<Int>(g.matrix_step),
           reinterpret_cast<R*>(table[g.x]), static_cast<Int>(g.x_step), 0,
           reinterpret_cast<R*>(table[g.y]), 1);
}

template <typename R, typename Int>
void call(const Dot& d, Table table) {
  const auto function = reinterpret_cast<DotOf<R, Int>>(blas.dot[std::is_same_v<R, double>]);
  *reinterpret_cast<R*>(table[d.to]) =
      function(static_cast<Int>(d.count), reinterpret_cast<R*>(table[d.x]), static_cast<Int>(d.x_step),
               reinterpret_cast<R*>(table[d.y]), static_cast<Int>(d.y_step));
}

#define FL_KERNELS "csrc/tape/outer.inc"
#include "../common/each_set.inc"

// Where there is nothing to add up BLAS has no order of its own, and takes four times as long.
template <typename R, typename Int>
void call(const Outer& o, Table table) {
  static const auto kernel = FL_CHOSEN(outer<R>);
  kernel(o.m, o.n, reinterpret_cast<R*>(table[o.a]), o.a_step, reinterpret_cast<R*>(table[o.b]),
         reinterpret_cast<R*>(table[o.c]), o.c_step, o.scalar);
}

int64_t work_of(const Gemm& g) { return g.m * g.n * g.k / 8 + 1; }
int64_t work_of(const Gemv& g) { return g.rows * g.columns / 4 + 1; }
int64_t work_of(const Dot& d) { return d.count / 4 + 1; }
int64_t work_of(const Outer& o) { return o.m * o.n; }

template <typename Kind>
class Multiply final : public Instruction {
 public:
  explicit Multiply(const Kind& kind) : kind_(kind), run_(chosen(kind)) {}
  Outcome run(Table table) override {
    run_(kind_, table);
    return Outcome::done;
  }
  int64_t work() const override { return work_of(kind_); }

 private:
  using Run = void (*)(const Kind&, Table);
  static Run chosen(const Kind& kind) {
    const Run is_long[] = {call<float, int64_t>, call<double, int64_t>};
    const Run is_short[] = {call<float, int>, call<double, int>};
    return (blas.is_long ? is_long : is_short)[kind.is_double];
  }

  Kind kind_;
  Run run_;
};

}  // namespace

std::unique_ptr<Instruction> multiply(const Gemm& gemm) { return std::make_unique<Multiply<Gemm>>(gemm); }
std::unique_ptr<Instruction> multiply(const Gemv& gemv) { return std::make_unique<Multiply<Gemv>>(gemv); }
std::unique_ptr<Instruction> multiply(const Dot& dot) { return std::make_unique<Multiply<Dot>>(dot); }
std::unique_ptr<Instruction> multiply(const Outer& outer) {
  return std::make_unique<Multiply<Outer>>(outer);
}

}  // namespace fl::tape

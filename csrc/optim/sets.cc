#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "optim.h"

namespace fl::optim {
namespace {
#define FL_RULE inline __attribute__((always_inline))
using std::fabs;
using std::sqrt;
#define FL_KERNELS "csrc/optim/kernels.inc"
#include "../common/each_set.inc"

#define FL_SET(name) \
  {#name, name::ROWS, name::sum_of_squares<float>, name::sum_of_squares<double>}
#ifdef FL_SEVERAL_SETS
const Set SETS[] = {FL_SET(baseline), FL_SET(avx2), FL_SET(avx512)};
const Set* const best = chosen(&SETS[0], &SETS[1], &SETS[2]);
#else
const Set SETS[] = {FL_SET(baseline)};
const Set* const best = &SETS[0];
#endif
const Set* used = best;
}  // namespace

const Set& chosen_set() { return *used; }

bool choose(const char* name) {
  for (const Set* set = SETS; set <= best; ++set) {
    if (std::strcmp(set->name, name) == 0) {
      used = set;
      return true;
    }
  }
  return false;
}

}  // namespace fl::optim

#include "script.h"

#include <cstring>

#include "reference.h"

namespace stress {

std::string describe(const fl_signature& s) {
  return "verb " + std::to_string(s.verb) + " of " + std::to_string(s.count) + " " +
         info_of(s.dtype).name + ", op " + std::to_string(s.op) + ", root " +
         std::to_string(s.root) + ", scale " + std::to_string(s.scale) + ", ndim " +
         std::to_string(s.ndim) + ", part of " + std::to_string(s.part_of);
}

void forget(fl_signature& signature) {
  const fl_signature full = signature;
  std::memset(&signature, 0, sizeof signature);
  signature.verb = full.verb;
  signature.root = full.root;
  signature.part_of = full.part_of;
  signature.ndim = FL_ANY;
}

}  // namespace stress

// Failing of a test.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace stress {

// Description of the current test case for reproducing a failure. Set it before threads start.
inline std::string& situation() {
  static std::string text;
  return text;
}

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "stress: %s\n  in %s\n", what.c_str(), situation().c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

inline void check(bool holds, const std::string& what) {
  if (!holds) fail(what);
}

}  // namespace stress

// How a test ends that has found something.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace stress {

// What is being tried, to be able to try it again; set before threads start.
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

// Where in the sources an address of the code lies.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace model {

// Of csrc or a case: the function, and `file:line`.
struct Place {
  std::string function, at;
};

std::string executable();
// Ask for many at once: the program reads all of its debugging information for each call.
void resolve(const std::vector<uintptr_t>& addresses);
// Of one that is resolved, with all that it is inlined into, innermost first.
const std::vector<Place>& places_of(uintptr_t address);
bool is_foreign(uintptr_t address);  // in std::shared_ptr
// A message, in which <address> stands for a place.
std::string with_places(const std::string& text);

}  // namespace model

// Source locations of code addresses.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace model {

// In csrc or a case: the function, and `file:line`.
struct Place {
  std::string function, at;
};

std::string executable();
// Resolve many addresses at once: the program reads all debugging information per call.
void resolve(const std::vector<uintptr_t>& addresses);
// Location of a resolved address, with all functions into which it is inlined, innermost first.
const std::vector<Place>& places_of(uintptr_t address);
bool is_foreign(uintptr_t address);  // in std::shared_ptr
// Replace each <address> in a message by its location.
std::string with_places(const std::string& text);

}  // namespace model

#include "places.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "model.h"

namespace model {
namespace {

std::map<uintptr_t, std::vector<Place>> places;
std::set<uintptr_t> foreign;

// The name without arguments, and the class that contains it.
std::string short_name(std::string name) {
  name = name.substr(0, name.find("::{lambda"));
  for (const char* space : {"fl::", "(anonymous namespace)::"}) {
    for (size_t at; (at = name.find(space)) != std::string::npos;) name.erase(at, std::strlen(space));
  }
  name = name.substr(0, name.find("operator()"));
  for (size_t end; (end = name.find('>')) != std::string::npos;) {
    const size_t begin = name.rfind('<', end);
    if (begin == std::string::npos) break;
    name.erase(begin, end + 1 - begin);
  }
  name = name.substr(0, name.find('('));
  return name.substr(name.rfind(' ') + 1);
}

}  // namespace

std::string executable() {
  char path[4096];
  const ssize_t bytes = readlink("/proc/self/exe", path, sizeof path - 1);
  return {path, static_cast<size_t>(std::max<ssize_t>(bytes, 0))};
}

void resolve(const std::vector<uintptr_t>& addresses) {
  std::vector<uintptr_t> unknown;
  for (const uintptr_t one : addresses) {
    if (one != 0 && places.try_emplace(one).second) unknown.push_back(one);
  }
  for (size_t begin = 0; begin < unknown.size(); begin += 500) {
    std::string command = "addr2line -a -i -f -C -e " + executable();
    for (size_t i = begin; i < std::min(begin + 500, unknown.size()); ++i) {
      char text[32];
      std::snprintf(text, sizeof text, " %lx", static_cast<unsigned long>(unknown[i] - 1));
      command += text;
    }
    FILE* const pipe = popen(command.c_str(), "r");
    char line[4096];
    uintptr_t now = 0;
    std::string function;
    while (pipe != nullptr && std::fgets(line, sizeof line, pipe) != nullptr) {
      if (std::strncmp(line, "0x", 2) == 0) {
        now = std::strtoul(line, nullptr, 16) + 1;
        function.clear();
        continue;
      }
      if (function.empty()) {
        function = line;
        function.pop_back();
        continue;
      }
      // Counting of shared pointers is the library's responsibility.
      if (std::strstr(line, "/ext/atomicity.h") != nullptr || std::strstr(line, "/shared_ptr") != nullptr) {
        foreign.insert(now);
      }
      for (const char* folder : {"csrc/", "model/"}) {
        const char* const found = std::strstr(line, folder);
        if (found == nullptr) continue;
        std::string place = found;
        place.resize(std::min(place.find('\n'), place.find(" (")));
        const size_t up = place.find("/../");
        if (up != std::string::npos) {
          const size_t folder_at = place.rfind('/', up - 1) + 1;  // 0 without an earlier slash
          place.erase(folder_at, up + 4 - folder_at);
        }
        places[now].push_back({short_name(function), place});
        break;
      }
      function.clear();
    }
    if (pipe != nullptr) pclose(pipe);
  }
}

const std::vector<Place>& places_of(uintptr_t address) { return places[address]; }
bool is_foreign(uintptr_t address) { return foreign.count(address) > 0; }

std::string with_places(const std::string& text) {
  std::string result;
  for (size_t at = 0; at < text.size();) {
    const size_t open = text.find('<', at), close = text.find('>', open);
    if (open == std::string::npos || close == std::string::npos) return result + text.substr(at);
    const uintptr_t address = std::strtoul(text.c_str() + open + 1, nullptr, 16);
    resolve({address});
    result += text.substr(at, open - at) + (places[address].empty() ? "?" : places[address].front().at);
    at = close + 1;
  }
  return result;
}

std::string place_of(const uintptr_t (&at)[4]) {
  for (const uintptr_t one : at) {
    const auto found = places.find(one);
    if (found != places.end() && !found->second.empty()) return found->second.front().at;
  }
  return "?";
}

void resolve_places(const uintptr_t* addresses, size_t count) { resolve({addresses, addresses + count}); }

}  // namespace model

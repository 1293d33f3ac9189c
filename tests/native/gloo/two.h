// Two ranks of this process, and the connection between them.
#pragma once

#include "../../../csrc/gloo/links.h"

inline std::shared_ptr<fl::Links> listening(int rank) {
  return std::make_shared<fl::Links>(fl::create_device("127.0.0.1", ""), rank, 2, false);
}

// A parcel handler that ignores all events.
struct Nothing final : fl::Parcels {
  void received(int, uint64_t, bool, fl::Parcel) override {}
  void sent(int, size_t) override {}
  void ended(int) noexcept override {}
};
inline Nothing nothing;

// Connect two ranks. `made` is called on Gloo's thread of the asked rank.
struct Two {
  explicit Two(const fl::Links::ConnectedHandler& made) {
    std::vector<char> addresses = asked->address();
    const size_t bytes = addresses.size();
    addresses.insert(addresses.end(), asking->address().begin(), asking->address().end());
    const std::vector<char> key(FL_KEY_BYTES);
    const auto told = [](int, uint64_t, const std::string&) {};
    const auto calls = [](uint64_t) { return int64_t{0}; };
    asked->open(addresses.data(), bytes, key.data(), made, told, calls, nothing);
    asking->open(addresses.data(), bytes, key.data(), [](int, fl::Pair&) {}, told, calls, nothing);
  }
  ~Two() {
    asked->close();
    asking->close();
  }

  const std::shared_ptr<fl::Links> asked = listening(0), asking = listening(1);
};

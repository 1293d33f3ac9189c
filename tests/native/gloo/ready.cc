// Two ranks connect. Prints of the one that was asked whether it had the connection when that was made, and
// whether the other one has it then. Then pairs of ranks do, of which one closes while Gloo's thread has its
// connection and has not ended the attempt yet.
#include <gloo/transport/tcp/device.h>

#include <future>
#include <iostream>
#include <memory>
#include <thread>

#include "../../../csrc/gloo/links.h"

namespace {

std::shared_ptr<fl::Links> listening(int rank) {
  gloo::transport::tcp::attr attributes;
  attributes.hostname = "127.0.0.1";
  auto device = gloo::transport::tcp::CreateDevice(attributes);
  return std::make_shared<fl::Links>(
      std::dynamic_pointer_cast<gloo::transport::tcp::Device>(device), rank, 2, false);
}

// Nothing is sent.
struct Nothing final : fl::Parcels {
  void received(int, uint64_t, bool, fl::Parcel) override {}
  void sent(int, size_t) override {}
  void ended(int) noexcept override {}
} nothing;

// Connect two ranks, `made` is called on Gloo's thread of the one that is asked.
struct Two {
  explicit Two(const fl::Links::Made& made) {
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

}  // namespace

int main() {
  std::promise<bool> had;
  fl::Links* asked = nullptr;
  {
    const Two two([&](int peer, fl::Pair&) { had.set_value(asked->is_connected(peer)); });
    asked = two.asked.get();
    const bool reached = two.asking->await(0, fl::Clock::now() + std::chrono::seconds(20));
    std::cout << had.get_future().get() << " " << reached << "\n";
  }
  for (int round = 0; round < 100; ++round) {
    std::thread closes;
    std::promise<void> made;
    const Two two([&](int, fl::Pair&) {
      closes = std::thread([&] { asked->close(); });
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // until it waits for the lock
      made.set_value();
    });
    asked = two.asked.get();
    two.asking->reach(0);
    made.get_future().wait();
    closes.join();
  }
}

// Two ranks connect. Prints of the one that was asked whether it had the connection when that was made, and
// whether the other one has it then.
#include <gloo/transport/tcp/device.h>

#include <future>
#include <iostream>
#include <memory>

#include "../../../csrc/gloo/links.h"

namespace {

std::shared_ptr<fl::Links> listening(int rank) {
  gloo::transport::tcp::attr attributes;
  attributes.hostname = "127.0.0.1";
  auto device = gloo::transport::tcp::CreateDevice(attributes);
  return std::make_shared<fl::Links>(
      std::dynamic_pointer_cast<gloo::transport::tcp::Device>(device), rank, 2, false);
}

}  // namespace

int main() {
  const auto asked = listening(0), asking = listening(1);
  std::vector<char> addresses = asked->address();
  const size_t bytes = addresses.size();
  addresses.insert(addresses.end(), asking->address().begin(), asking->address().end());
  const std::vector<char> proofs(4 * FL_PROOF_BYTES);
  const auto nothing = [](int) {};
  std::promise<bool> had;
  asked->open(addresses.data(), bytes, proofs.data(),
              [&](int peer, gloo::transport::Pair&) { had.set_value(asked->is_connected(peer)); },
              nothing);
  asking->open(addresses.data(), bytes, proofs.data(), [](int, gloo::transport::Pair&) {}, nothing);
  const bool reached = asking->await(0, fl::Clock::now() + std::chrono::seconds(20));
  std::cout << had.get_future().get() << " " << reached << "\n";
  asked->close();
  asking->close();
}

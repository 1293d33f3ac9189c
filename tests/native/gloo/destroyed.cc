// destroyed ROUNDS: one thread destroys a buffer while Gloo's thread receives its message. Built with the
// undefined-behavior sanitizer, the program fails if Gloo's thread uses a destroyed buffer.
#include <cstdlib>
#include <thread>

#include "two.h"

namespace {

constexpr size_t kBytes = 64;
constexpr int kDelays = 40;  // microseconds

struct Direct final : fl::Route {
  explicit Direct(fl::Links& links) : Route(0), links(links) {}
  fl::Pair& pair_with(int peer) override { return *links.pair(peer); }
  fl::Links& links;
};

}  // namespace

int main(int, char** arguments) {
  const Two two([](int, fl::Pair&) {});
  const auto end = fl::Clock::now() + std::chrono::seconds(20);
  if (!two.asking->await(0, end) || !two.asked->await(1, end)) return 1;
  Direct out(*two.asked), in(*two.asking);
  for (int round = 0; round < std::atoi(arguments[1]); ++round) {
    char sent[kBytes] = {}, received[kBytes];
    fl::Receiver sends(two.asked, out, sent, kBytes);
    sends.send(1, round, 0, kBytes);
    {
      fl::Receiver receives(two.asking, in, received, kBytes);
      receives.recv(0, round, 0, kBytes);
      const auto until = fl::Clock::now() + std::chrono::microseconds(round % kDelays);
      while (fl::Clock::now() < until) continue;
    }
    sends.waitSend(nullptr, std::chrono::seconds(20));
  }
}

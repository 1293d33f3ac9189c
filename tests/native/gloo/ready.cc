// Two ranks connect. Prints whether the asked rank counted as connected when its handler ran, and whether the
// other rank is connected. Then pairs of ranks connect, and one closes while Gloo's thread has its connection
// and has not ended the attempt.
#include <future>
#include <iostream>
#include <thread>

#include "two.h"

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

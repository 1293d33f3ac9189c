// Descriptors that a heartbeat closes in a forked child must still be its own. Prints the descriptors that
// were closed although their numbers had been reused.
#include <arpa/inet.h>
#include <fcntl.h>

#include <iostream>

#include "../../../csrc/gloo/heartbeat.h"

namespace {

// Return the next descriptor number that will be opened.
int next_number() {
  const int number = dup(0);
  close(number);
  return number;
}

template <typename Abandon>
void check(const char* name, int number, Abandon abandon) {
  const int other = open("/dev/null", O_RDONLY);
  dup2(other, number);
  abandon();
  if (fcntl(number, F_GETFD) < 0) std::cout << name << "\n";
  close(other);
}

}  // namespace

int main() {
  sockaddr_storage here{};
  auto& in = reinterpret_cast<sockaddr_in&>(here);
  in.sin_family = AF_INET;
  in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int listener = next_number();
  fl::Heartbeat heartbeat(0, here);
  check("the listener", listener, [&] { heartbeat.abandon(); });
  const int connection = next_number();
  fl::Line line(reinterpret_cast<const sockaddr_in6&>(here));
  check("a connection", connection, [&] { line.abandon(); });
}

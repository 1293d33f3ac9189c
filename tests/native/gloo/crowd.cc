// Heartbeats of many ranks on one host that all ask the only rank of another host, in turns on one thread.
// Prints the number of connections of that rank after a while.
#include <arpa/inet.h>

#include <cstring>
#include <fstream>
#include <iostream>
#include <thread>

#include "../../../csrc/gloo/heartbeat.h"

namespace {

using fl::Clock, fl::Heartbeat;

constexpr double kLimit = 5.0;
constexpr std::chrono::seconds kWhile{1};

sockaddr_storage loopback() {
  sockaddr_storage address{};
  auto& in = reinterpret_cast<sockaddr_in&>(address);
  in.sin_family = AF_INET;
  in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// Return the number of established connections to a port of the loopback, from proc(5).
int connections(int port) {
  std::ifstream table("/proc/net/tcp");
  std::string line, number, here, there, state;
  std::getline(table, line);
  int count = 0;
  while (table >> number >> here >> there >> state && std::getline(table, line)) {
    count += std::stoi(here.substr(here.find(':') + 1), nullptr, 16) == port && state == "01";
  }
  return count;
}

}  // namespace

int main(int, char** arguments) {
  const int size = std::stoi(arguments[1]);
  std::vector<std::unique_ptr<Heartbeat>> ranks;
  std::vector<int> numbers(size);
  std::vector<sockaddr_in6> addresses(size);
  for (int r = 0; r < size; ++r) {
    ranks.push_back(std::make_unique<Heartbeat>(r, loopback()));
    numbers[r] = r == size - 1;
    sockaddr_storage address = loopback();
    fl::set_port(address, ranks[r]->port());
    std::memcpy(&addresses[r], &address, sizeof addresses[r]);
  }
  const std::vector<std::string> names{"a", "b"};
  const auto hosts = std::make_shared<const fl::Hosts>(numbers, names, addresses, "a key", kLimit);
  for (const auto& each : ranks) each->begin(hosts);
  for (const auto end = Clock::now() + kWhile; Clock::now() < end;) {
    for (const auto& each : ranks) {
      if (Clock::now() < each->due()) continue;
      if (const auto lost = each->update()) std::cout << lost->what() << "\n";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::cout << connections(ranks.back()->port()) << "\n";
}

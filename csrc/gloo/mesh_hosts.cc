// What a mesh does about hosts that cannot be reached any more: it ends, and other groups with it.
#include <gloo/transport/tcp/address.h>
#include <netinet/in.h>

#include <cstring>
#include <utility>

#include "mesh.h"

namespace fl {
namespace {

sockaddr_storage socket_address(const std::vector<char>& bytes) {
  return gloo::transport::tcp::Address(bytes).getSockaddr();
}

}  // namespace

Hosts read_hosts(const fl_hosts& given, int size, const char* addresses, size_t bytes,
                 const char* proofs) {
  Hosts hosts;
  hosts.seconds = given.seconds;
  for (int r = 0; r < size; ++r) {
    hosts.numbers.push_back(given.numbers[r]);
    hosts.names.emplace_back(given.names[r]);
    const char* at = addresses + r * bytes;
    hosts.addresses.push_back(socket_address({at, at + bytes}));
    set_port(hosts.addresses.back(), given.ports[r]);
    const char* mine = proofs + 2 * FL_PROOF_BYTES * r;
    hosts.shown.emplace_back(mine, FL_PROOF_BYTES);
    hosts.expected.emplace_back(mine + FL_PROOF_BYTES, FL_PROOF_BYTES);
  }
  return hosts;
}

int Mesh::listen_for_hosts() {
  heartbeat_ = std::make_unique<Heartbeat>(rank, socket_address(address()));
  return heartbeat_->port();
}

void Mesh::watch_hosts(Hosts hosts) {
  if (!(hosts.seconds > 0)) return heartbeat_.reset();
  links_->keep_alive_for(patience_ = hosts.seconds);
  if (heartbeat_ == nullptr) return;  // another mesh watches, and takes this one along
  heartbeat_->begin(std::move(hosts));
  watch_.also([this] {
    if (const auto lost = heartbeat_->look()) lose(*lost);
    return heartbeat_->due();
  });
}

void Mesh::take_along(Companion companion) {
  const std::lock_guard<std::mutex> lock(mutex_);
  companions_.push_back(std::move(companion));
}

// The next operation raises what has happened, as do those that wait.
void Mesh::lose(const Failure& failure) noexcept {
  if (watch_.reason()) return;
  watch_.foretell(failure);  // to notify others takes time, in which a connection may break
  give_up(failure);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Companion& companion : companions_) {
    companion.give_up(companion.other, (words_of(failure) + companion.advice).c_str());
  }
}

// As this rank's Python code says it of an error that ends another group: see native_errors.py.
std::string Mesh::words_of(const Failure& failure) const {
  std::string names;
  for (int r : failure.missing) {
    names += (names.empty() ? "" : ", ") + name(r).substr(std::strlen("rank "));
  }
  return std::string("Plost rank") + (failure.missing.size() > 1 ? "s " : " ") + names + " (" +
         failure.what() + ")";
}

}  // namespace fl

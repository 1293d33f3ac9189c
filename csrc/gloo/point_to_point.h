// Messages between two ranks. Those of one direction and tag come one after the other, the others
// on threads beside each other.
#pragma once

#include <atomic>

#include "collectives.h"
#include "notices.h"

namespace fl {

// Each throws Failure, or Mismatch before any payload has moved, or what Gloo throws where a
// connection is broken already.
class PointToPoint {
 public:
  explicit PointToPoint(Mesh& mesh) : mesh_(mesh), notices_(mesh) {}

  // Once, when every peer is connected.
  void open() { notices_.open(); }

  // Ends when the peer has received.
  void send(Call& call, const void* data, int peer);
  void recv(Call& call, void* data, int peer);

 private:
  Told meet(Call& call, Notice& notice, int peer);
  Told hear(const Call& call, int peer, int verb);
  std::string instead(const fl_signature& mine, int peer);
  void send_large(Call& call, const void* data, int peer);
  void recv_rest(Call& call, gloo::transport::UnboundBuffer& into, int peer);

  Mesh& mesh_;
  Notices notices_;
  std::atomic<uint32_t> calls_{0};
};

}  // namespace fl

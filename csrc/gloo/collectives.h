// The collectives, each written once on a Mesh. All are called by the group's one worker thread.
#pragma once

#include <memory>
#include <vector>

#include "mesh.h"

namespace fl {

class Collectives {
 public:
  explicit Collectives(Mesh& mesh);
  ~Collectives();

  // Post the receives of the first headers; once, when every peer is connected.
  void open();

  // Each throws Failure, or Mismatch before any payload has moved, or what Gloo throws where a
  // connection is broken already. `seen` gets every rank's
  // signature that arrived.
  using Seen = std::vector<fl_signature>;
  void barrier(const fl_signature& mine, Seen& seen);
  void all_reduce(const fl_signature& mine, void* data, Seen& seen);
  void reduce_scatter(const fl_signature& mine, const void* data, void* output, Seen& seen);
  void broadcast(const fl_signature& mine, void* data, Seen& seen);
  Bytes all_gather(const fl_signature& mine, const void* data, Seen& seen);
  void send(const fl_signature& mine, void* data, int peer, Seen& seen);
  void recv(const fl_signature& mine, void* data, int peer, Seen& seen);

 private:
  struct Frame;
  struct Part;
  void exchange_headers(const fl_signature& mine, const void* payload, size_t bytes, Seen& seen);
  void post_headers();
  void reduce_inline(const fl_signature& mine, size_t skip, size_t count, void* into);
  void reduce_parts(const fl_signature& mine, const void* data, void* output,
                    const std::vector<Part>& parts, bool gather);
  void exchange_parts(const std::vector<Part>& mine, const void* from,
                      const std::vector<Part>& theirs, void* into);
  void handshake(const fl_signature& mine, int peer, bool sender, Seen& seen);
  void check(const Seen& seen, const fl_signature& mine);

  Mesh& mesh_;
  const int rank_;
  const int size_;
  std::unique_ptr<Frame> outgoing_;
  std::vector<Frame> incoming_;
  Buffer outgoing_buffer_;
  std::vector<Buffer> incoming_buffers_;
  std::vector<char> scratch_;
};

}  // namespace fl

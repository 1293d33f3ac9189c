// What two ranks send each other of the messages between them, before payloads move: each end of a
// message an envelope, with the call that it makes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "mesh.h"

namespace fl {

// Payloads up to this size travel inside the sender's envelope, in one step instead of two.
constexpr size_t kInlineMessage = 64 << 10;

inline size_t bytes_of(const fl_signature& call) {
  return static_cast<size_t>(call.count) * call.itemsize;
}
inline bool is_large(const fl_signature& call) { return bytes_of(call) > kInlineMessage; }

// The call of one end, and with a small send its payload. Memory beyond is not touched.
struct Envelope {
  fl_signature call;
  fl_site site;
  char payload[kInlineMessage];
  Buffer buffer;  // of all above
};
using EnvelopePtr = std::unique_ptr<Envelope>;

// Envelopes of all messages with a peer come through one slot, whose receives are posted ahead, so
// that an envelope arrives in one step. Of the threads that wait for envelopes of a peer, one reads for
// all of them.
class Envelopes {
 public:
  explicit Envelopes(Mesh& mesh);
  ~Envelopes();

  // Post the first receives of those that are connected; once.
  void open();

  // A envelope to be filled in; and back with one that nobody sends or receives any more.
  EnvelopePtr blank();
  void take_back(EnvelopePtr envelope);

  // Send `envelope` to `peer`: wait until its buffer is sent.
  void give(const Envelope& envelope, int peer);

  // Wait for the next envelope of `peer` with this verb and tag; throws Failure.
  EnvelopePtr receive(int peer, int verb, int32_t tag, Waiter& waiter);

  // Read what `peer` has sent; waits no longer than for an envelope that is arriving.
  // Throws Failure.
  void read_arriving(int peer, Waiter& waiter);

  // Whether an envelope of a send of `peer` with this tag has been read and not taken; its call.
  bool has_arrived(int peer, int32_t tag, fl_signature& call);

  // The calls of `peer` whose envelopes have been read and not taken.
  std::vector<fl_signature> not_taken(int peer);

  std::atomic<uint32_t> searches{0};  // for messages of any rank, so far

 private:
  struct Line;
  void post(Line& line, int peer);
  static bool is_arriving(Line& line);
  void read(Line& line, std::unique_lock<std::mutex>& lock, int peer, Waiter& waiter);

  Mesh& mesh_;
  std::vector<std::unique_ptr<Line>> lines_;  // by peer
  std::mutex mutex_;
  std::vector<EnvelopePtr> blanks_;
};

}  // namespace fl

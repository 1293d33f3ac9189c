// What two ranks tell each other of the messages between them: each end of a message gives notice
// of itself to the other end, before the payload moves.
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

// Payloads up to this size travel inside the sender's notice, in one step instead of two.
constexpr size_t kInlineMessage = 64 << 10;

inline size_t bytes_of(const fl_signature& call) {
  return static_cast<size_t>(call.count) * call.itemsize;
}
inline bool is_large(const fl_signature& call) { return bytes_of(call) > kInlineMessage; }

// What is told: `call`, and with a small send its payload. Memory beyond is not touched.
struct Notice {
  fl_signature call;
  fl_site site;
  char payload[kInlineMessage];
  Buffer buffer;  // of all above
};
using NoticePtr = std::unique_ptr<Notice>;

// Notices of all messages with a peer come through one slot, whose receives are posted ahead, so
// that a notice arrives in one step. Of the threads that wait for notices of a peer, one reads for
// all of them.
class Notices {
 public:
  explicit Notices(Mesh& mesh);
  ~Notices();

  // Post the first receives; once, when every peer is connected.
  void open();

  // A notice to be filled in; and back with one that nobody sends or receives any more.
  NoticePtr blank();
  void take_back(NoticePtr notice);

  // Send `notice` to `peer`: wait until its buffer is sent.
  void give(const Notice& notice, int peer);

  // Wait for the next notice of `peer` with this verb and tag; throws Failure.
  NoticePtr receive(int peer, int verb, int32_t tag, Waiter& waiter);

  // Read what `peer` has given notice of; waits no longer than for a notice that is arriving.
  // Throws Failure.
  void read_arriving(int peer, Waiter& waiter);

  // Whether it has been read that `peer` sends with this tag, and nobody has heard it yet.
  bool is_told(int peer, int32_t tag, fl_signature& call);

  // What `peer` has told and nobody here has heard yet.
  std::vector<fl_signature> unheard(int peer);

  std::atomic<uint32_t> searches{0};  // for messages of any rank, so far

 private:
  struct Line;
  void post(Line& line, int peer);
  static bool is_arriving(Line& line);
  void read(Line& line, std::unique_lock<std::mutex>& lock, int peer, Waiter& waiter);

  Mesh& mesh_;
  std::vector<std::unique_ptr<Line>> lines_;  // by peer
  std::mutex mutex_;
  std::vector<NoticePtr> blanks_;
};

}  // namespace fl

// Finds out whose message a receive takes that does not know who sends, or how much.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "abi.h"
#include "queues.h"

namespace fl {

// Messages of one direction between two ranks with one tag keep their order; a receive that has to
// find out who sends waits in a queue of its own.
inline QueueId queue_of(const fl_message& message) {
  const fl_signature& call = message.signature;
  return {message.peer < 0 ? kAnyRank : message.peer, call.verb == FL_SEND, call.root};
}

// A transport looks for what has come, waits, and says who sends what.
class Search {
 public:
  // For sends with the tag of `asked`, a receive of its peer, whose queue the caller is in, or where
  // that is -1 of any of `size` ranks: then the queue of the one that is found is entered, so that no
  // other receive takes its message. `searches` counts those so far: each begins with another rank, so
  // that nobody who sends again and again keeps the others from it.
  Search(Queues& queues, const fl_message& asked, int rank, int size, std::atomic<uint32_t>& searches);
  Search(const Search&) = delete;

  // The receive of what was found, of which `match` is told; its peer is -1 where nothing was.
  fl_message receive(const fl_message& asked, fl_match& match) const;

 protected:
  ~Search() = default;

  // Whether `from` has sent, and nobody taken, a message with tag_, and what that is.
  virtual bool has_come(int from, fl_signature& call) = 0;
  // The tags of all that `from` has sent and nobody taken.
  virtual std::vector<int32_t> tags_of(int from) = 0;
  virtual std::string name_of(int from) const = 0;

  // Whether something is found.
  bool look();
  // After a search in vain.
  std::string what_is_sent();

  const int32_t tag_;
  std::vector<int> ranks_;  // that may send

 private:
  Queues& queues_;
  const bool any_;
  int found_ = -1;
  fl_signature offered_{};
};

}  // namespace fl

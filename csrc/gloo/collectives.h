// The collectives of the Gloo backend, on top of a Mesh.
#pragma once

#include <array>

#include "../common/ahead.h"
#include "mesh.h"
#include "model.h"
#include "relay.h"

namespace fl {

// Chunk size, in bytes, of large arrays. One chunk is processed while the next chunk is transferred.
constexpr size_t kChunkBytes = 512 << 10;

// A byte range of an array. Parts contains one range per rank.
struct Part {
  size_t begin = 0;
  size_t bytes = 0;
};
using Parts = std::vector<Part>;

// Return ranges without gaps, in rank order. The range of rank r has bytes(r) bytes.
template <typename Bytes>
Parts adjacent_parts(int ranks, Bytes bytes) {
  Parts parts(ranks);
  size_t begin = 0;
  for (int r = 0; r < ranks; ++r) {
    parts[r] = {begin, static_cast<size_t>(bytes(r))};
    begin += parts[r].bytes;
  }
  return parts;
}

inline size_t longest(const Parts& parts) {
  size_t bytes = 0;
  for (const Part& part : parts) bytes = std::max(bytes, part.bytes);
  return bytes;
}

// A running operation.
struct Call {
  const fl_signature& signature;
  const fl_site& site;
  CallReport& report;  // output: the calls of all ranks; after a timeout, their last known calls
  Waiter& waiter;

  size_t bytes() const { return static_cast<size_t>(signature.count) * signature.itemsize; }
};

// The collectives of one group. If calls differ, a function throws Mismatch before it sends large data. It
// throws Failure, or Gloo's exception if a connection is already broken. Not thread-safe.
class Collectives {
 public:
  explicit Collectives(Mesh& mesh);

  // Create the buffers. If the neighbours are connected, post receives for their first headers.
  void open();
  // Combine small arrays of the ranks of each host before the results of the hosts.
  void sum_by_hosts(std::vector<int> host_of) { host_of_ = std::move(host_of); }
  // Wait until all data of earlier calls has been sent, but not longer than until `end`.
  void flush(Clock::time_point end) noexcept;

  // If `rank` has announced a call that this rank has not made, store its signature in `call` and return
  // true. This function must not run during a call of this rank.
  bool is_ahead(int rank, fl_signature& call);

  // Return the last known call of each other rank, with its age.
  CallReport last_calls();

  // The verbs; see common/verbs.h.
  void barrier(Call& call);
  void all_reduce(Call& call, void* data);
  void reduce(Call& call, void* data);
  void scan(Call& call, void* data);
  void reduce_scatter(Call& call, const void* data, void* output);
  void reduce_scatter_uneven(Call& call, const fl_sections& sections, void* output);
  Bytes broadcast(Call& call, void* data);
  // If the received data has the size of `room`, it is stored there and the result is empty. Otherwise the
  // result contains the data.
  Bytes all_gather(Call& call, const void* data, const fl_room* room);
  Bytes gather(Call& call, const void* data, const fl_room* room);
  Bytes scatter(Call& call, const void* data, void* output);
  void all_to_all(Call& call, const void* data, void* output);
  void all_to_all_uneven(Call& call, const fl_sections& sections, void* output);

 private:
  // Maximum bytes of a payload in a header. A larger payload is sent after the header, because a copy into
  // the header would take longer.
  static constexpr size_t kInlineBytes = 65 << 10;
  // kMostAhead: maximum number of calls between the last compared call and this rank's call. It is smaller if
  // receivers would have to store more than kAheadBytes. kTurns: number of stored calls per peer: a peer is
  // ahead of this rank by at most kMostAhead calls.
  static constexpr uint32_t kMostAhead = 1023, kTurns = 2 * (kMostAhead + 1);
  static constexpr size_t kAheadBytes = 2 << 20;
  // Headers that no rank waits for are delayed (Pair::call), except in every kHurryEvery-th call.
  static constexpr uint32_t kHurryEvery = 128;
  // How a rank makes a call: it waits for all other ranks (kWaits), or it may return before they call.
  enum WaitMode : uint32_t { kWaits, kRunsAhead };
  // Call and call site of a rank, sent in a header before its payload. Both ends store kTexts of them for each
  // direction. The tag of a header is the number of its Text, and flags. kRepeats: the receiver has the Text.
  struct alignas(16) Text {
    fl_signature signature;
    fl_site site;
    uint64_t padding;
  };
  // kForwards: the packet follows the sender's header, and has the Text and the payload of the root.
  static constexpr uint64_t kTexts = 32, kRepeats = 1 << 8, kAhead = 1 << 9, kForwards = 1 << 10;
  struct Entry {
    std::shared_ptr<const Text> text;
    WaitMode mode = kWaits;
    std::optional<Parcel> parcel;
    size_t payload = 0;                // offset of the payload in the parcel
    std::unique_ptr<Entry> forwarded;  // the root's entry, if this rank has forwarded it

    fl_signature call(uint32_t number) const;
  };
  class ReductionInParts;

  void exchange_calls(Call& call, const void* data, const Parts& give);
  void begin();
  void enter(Call& call, const void* data, const Parts& give);
  void announce(const fl_signature& signature, const fl_site& site, const void* data, const Parts& give,
                WaitMode mode);
  template <typename Send>
  void ignore_if_left(int r, Send send);
  bool uses_tree(const fl_signature& call) const;
  Ranks needed_by(int rank, const fl_signature& call) const;
  bool receive_some(Call& call, Ranks needed);
  void receive_in_tree(const Call& call);
  void receive_all(Call& call);
  void wait_for(uint32_t number, int r);
  void wait_for_packet(int r);
  bool has_arrived(uint32_t number, int r) const;
  void store_arrived(int r) const;
  bool all_have_called(uint32_t number) const;
  CallReport report_of(uint32_t number) const;
  bool compare_call(uint32_t number);
  const Entry& latest(int r) const;                            // of the current call
  const fl_signature& call_of(const Call& call, int r) const;  // this rank must have received it
  void raise_new_mismatch(const Call& call);
  void raise_earlier(std::optional<Mismatches::Call> earlier) const;
  Part common_part(const Parts& give) const;
  void send_separately(const char* data, const Parts& give);
  void fetch(const Parts& take);
  // Return the payload of rank r in this call. It is valid until the next call.
  const char* payload(int r) const;
  Entry& entry(int r, uint32_t number) const { return entries_[r * kTurns + number % kTurns]; }
  std::vector<int> not_arrived(const Call& call);
  void store_calls(Call& call);

  Parts same_for_all(size_t bytes) const;
  Parts equal_sections(size_t bytes) const;

  void reduce_inline(const Call& call, const void* data, size_t skip, size_t count, void* into);
  void scan_inline(const Call& call, void* data);
  void reduce_sections(Call& call, const void* data, void* output, const Parts& sections);
  void reduce_in_parts(Call& call, const void* data, char* output, const Parts& parts, int collector);
  void make_rooms();
  void request_chunk(size_t at);

  void deliver(Call& call, const void* from, const Parts& give, void* into, const Parts& take);
  void move_large(Call& call, const void* from, const Parts& give, char* into, const Parts& take);
  void send_parts(Call& call, const void* data, size_t bytes, const Parts& parts);
  void forward_part(Call& call, char* data, const Parts& parts);
  Bytes gather_to(Call& call, const void* data, bool wanted, const Parts& give, const fl_room* room);

  Mesh& mesh_;
  const int rank_;
  const int size_;
  const bool uses_relay_;          // other ranks forward the calls: see Relay
  std::vector<int> host_of_;     // number of each rank's host; empty: arrays are combined in rank order
  bool compares_at_once_ = false;  // each call waits until all ranks have made it
  bool has_begun_ = false;
  // Index: peer. counters_: arrived packets. arrived_: number of the last stored call.
  std::vector<Buffer> counters_;
  mutable std::vector<uint32_t> arrived_;
  mutable std::vector<Entry> entries_;  // the last calls of each rank; empty with a relay
  mutable std::vector<std::shared_ptr<const Text>> texts_;  // kTexts of each rank
  mutable std::vector<ArrivedCall> taken_calls_;
  std::vector<std::shared_ptr<const Text>> compared_texts_;  // of the last compared call, if it was the same
  Relay relay_;
  Waiter* waiter_ = nullptr;
  uint32_t calls_ = 0;        // number of this rank's calls; 0 with a relay
  uint32_t compared_ = 0;     // number of the last compared call
  uint32_t awaited_ = 0;      // number of the call that this rank awaits
  int sender_ = 0;            // in a tree, the rank from which this rank has received the root's data
  Mismatches mismatches_{rank_, kMostAhead};
  // last_: with a relay, calls of the latest collective. received_at_: when calls last arrived.
  CallReport last_;
  Clock::time_point received_at_;
  // Memory for received chunks in large reductions. It is kept between calls.
  std::unique_ptr<char[]> scratch_;
  std::vector<Buffer> rooms_;
  size_t taken_ = 0;  // number of chunks received from each peer so far, equal for all peers
};

}  // namespace fl

// The collectives of the Gloo backend, on top of a Mesh.
#pragma once

#include "../common/ahead.h"
#include "mesh.h"
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
  ~Collectives();

  // Create the buffers. If the neighbours are connected, post receives for their first headers.
  void open();
  // Wait until all data of earlier calls has been sent, but not longer than until `end`.
  void flush(Clock::time_point end) noexcept;

  // If `rank` has announced a call that this rank has not made, store its signature in `call` and return
  // true. This function must not run during a call of this rank.
  bool is_ahead(int rank, fl_signature& call) const;

  // Return the last known call of each other rank, with its age.
  CallReport last_calls() const;

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
  // kMostAhead: maximum number of calls between the last compared call and this rank's call. kTurns: number
  // of header frames per peer. With n = kMostAhead + 1, headers k and k - 2 n use the same frame. When header
  // k is sent, this frame is free: its sender has received header k - n of every rank, and each rank released
  // the frames of call k - 2 n before it sent its header k - n.
  static constexpr uint32_t kMostAhead = 31, kTurns = 2 * (kMostAhead + 1);
  // Maximum number of headers to one peer that wait until the kernel accepts them.
  static constexpr uint32_t kLeaving = 8;
  // Headers that no rank waits for are sent with MSG_MORE (delayed), except in every kHurryEvery-th call.
  static constexpr uint32_t kHurryEvery = 16;
  // How a rank makes a call: it waits for all other ranks (kWaits), or it may return before they call.
  enum WaitMode : uint32_t { kWaits, kRunsAhead };
  struct Frame {
    fl_signature signature;
    WaitMode mode;
    uint32_t site_bytes;
    char data[sizeof(fl_site) + kInlineBytes];  // text of the call site, then the payload

    const char* payload() const { return data + site_bytes; }
    void set_site(const fl_site& site);
    fl_site site() const;
  };
  struct Unmap {
    size_t bytes;
    void operator()(Frame* memory) const;
  };
  using Frames = std::unique_ptr<Frame[], Unmap>;
  struct OwnCall {
    fl_signature signature;
    fl_site site;
    WaitMode mode;
  };
  class ReductionInParts;

  void exchange_calls(Call& call, const void* data, const Parts& give);
  void begin();
  void enter(Call& call, const void* data, const Parts& give);
  void announce(const fl_signature& signature, const fl_site& site, const void* data, const Parts& give,
                WaitMode mode);
  void await_leaving(int r);
  template <typename Send>
  void ignore_if_left(int r, Send send);
  Ranks needed_by(int rank, const fl_signature& call) const;
  bool receive_some(Call& call, Ranks needed);
  void receive_all(Call& call);
  void wait_for(uint32_t number, int r);
  bool has_arrived(uint32_t number, int r) const;
  bool all_have_called(uint32_t number) const;
  CallReport report_of(uint32_t number) const;
  bool compare_call(uint32_t number);
  WaitMode mode_of(int r, uint32_t number) const;
  void raise_new_mismatch(const Call& call);
  void raise_earlier(std::optional<Mismatches::Call> earlier) const;
  size_t common_bytes(const Parts& give) const;
  void relay_calls(Call& call, const void* data, const Parts& give, size_t bytes);
  void send_separately(const void* data, const Parts& give);
  void fetch(const Parts& take);
  // Return the payload of rank r in this call. It is valid until the next call.
  const char* payload(int r) const;
  void await_pending();
  void post_header(int r, uint32_t number, bool grants);
  static Frames frames(size_t count);
  uint32_t turns() const { return uses_relay_ ? 1 : kTurns; }
  const Frame& incoming(int r, uint32_t number) const { return incoming_[r * turns() + number % turns()]; }
  std::vector<int> not_arrived(const Call& call);
  void store_calls(Call& call);

  Parts same_for_all(size_t bytes) const;
  Parts equal_sections(size_t bytes) const;

  void reduce_inline(const Call& call, const void* data, size_t skip, size_t count, void* into);
  void scan_inline(const Call& call, void* data);
  void reduce_sections(Call& call, const void* data, void* output, const Parts& sections);
  void reduce_in_parts(Call& call, const void* data, char* output, const Parts& parts, int collector);
  gloo::transport::UnboundBuffer& room(int r);
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
  bool compares_at_once_ = false;  // each call waits until all ranks have made it
  bool has_begun_ = false;
  Frames outgoing_, incoming_;
  // Index: peer. leaving_: number of unsent headers. received_: number of the last received call.
  std::vector<Buffer> outgoing_buffers_, incoming_buffers_;
  std::vector<uint32_t> leaving_, received_;
  std::vector<OwnCall> own_calls_;  // the last calls of this rank; empty with a relay
  Relay relay_;
  Waiter* waiter_ = nullptr;
  std::vector<int> pending_;  // ranks whose payloads send_separately() is sending
  uint32_t calls_ = 0;        // number of this rank's calls; 0 with a relay
  uint32_t compared_ = 0;     // number of the last compared call
  uint32_t reposted_ = 0;     // receives are posted for the headers up to reposted_ + kTurns
  uint32_t awaited_ = 0;      // number of the call that this rank awaits
  Mismatches mismatches_{rank_, kMostAhead};
  // last_: calls of the latest collective that all ranks have called. received_at_: when calls last arrived.
  CallReport last_;
  Clock::time_point received_at_;
  // Memory for received chunks in large reductions. It is kept between calls.
  std::unique_ptr<char[]> scratch_;
  std::vector<Buffer> rooms_;
  size_t taken_ = 0;  // number of chunks received from each peer so far, equal for all peers
};

}  // namespace fl

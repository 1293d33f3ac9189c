// The collectives of the Gloo backend, on top of a Mesh.
#pragma once

#include "../common/ahead.h"
#include "mesh.h"
#include "relay.h"

namespace fl {

// Chunk size, in bytes, of large arrays. One chunk is processed while the next chunk is transferred.
constexpr size_t kChunkBytes = 512 << 10;

// A byte range of an array; Parts has one range for each rank.
struct Part {
  size_t begin = 0;
  size_t bytes = 0;
};
using Parts = std::vector<Part>;

// Return adjacent parts; the part of rank r has `bytes(r)` bytes.
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
  CallReport& report;  // receives every rank's call, or after a timeout the last known calls
  Waiter& waiter;

  size_t bytes() const { return static_cast<size_t>(signature.count) * signature.itemsize; }
};

// The collectives. Each throws Failure, Mismatch before any payload has moved, or Gloo's exception if a
// connection is already broken. Not thread-safe.
class Collectives {
 public:
  explicit Collectives(Mesh& mesh);
  ~Collectives();

  // Post receives for the first header of every peer. Call it once, after all peers are connected.
  void open();
  // Wait until all data of earlier calls has been sent, but not longer than until `end`.
  void flush(Clock::time_point end) noexcept;

  // True if `rank` has announced a call that this rank has not made; `call` receives it. Use between calls.
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
  // If `room` has the size of the received data, the data is stored in `room` and the result is empty.
  Bytes all_gather(Call& call, const void* data, const fl_room* room);
  Bytes gather(Call& call, const void* data, const fl_room* room);
  Bytes scatter(Call& call, const void* data, void* output);
  void all_to_all(Call& call, const void* data, void* output);
  void all_to_all_uneven(Call& call, const fl_sections& sections, void* output);

 private:
  // Maximum payload, in bytes, inside a header. Copying more would take longer than a second step of the
  // call.
  static constexpr size_t kInlineBytes = 65 << 10;
  // kMostAhead: number of calls by which a rank that needs no data of other ranks may be ahead. kTurns:
  // number of frames for unrequested headers, which suffices. Let n = kMostAhead + 1. The sender of header k
  // has all headers of call k - n, and their senders have compared and released call k - 2 n.
  static constexpr uint32_t kMostAhead = 31, kTurns = 2 * (kMostAhead + 1);
  // Maximum number of calls whose data the kernel may not have accepted yet.
  static constexpr uint32_t kLeaving = 8;
  // Headers that no rank waits for are sent with MSG_MORE, except every kHurryEvery-th.
  static constexpr uint32_t kHurryEvery = 16;
  // How a rank makes a call: it waits for all other ranks, or it may return before they call.
  enum WaitMode : uint32_t { kWaits, kRunsAhead };
  struct Frame {
    fl_signature signature;
    WaitMode mode;
    uint32_t site_bytes;
    char data[sizeof(fl_site) + kInlineBytes];  // the site's text, then the payload

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
  // The payload of rank r that arrived with its header or was fetched. Valid until the next call.
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
  const bool uses_relay_;          // calls travel through other ranks: see Relay
  bool compares_at_once_ = false;  // no call returns before all ranks have made it
  bool has_begun_ = false;
  // Frames by peer and call. Pages that no payload reaches stay untouched.
  Frames outgoing_, incoming_;
  // For each peer: buffers over all frames. leaving_: calls still being sent. received_: last call received.
  std::vector<Buffer> outgoing_buffers_, incoming_buffers_;
  std::vector<uint32_t> leaving_, received_;
  std::vector<OwnCall> own_calls_;  // the last calls of this rank, as long as they may not be compared
  Relay relay_;
  Waiter* waiter_ = nullptr;  // waits of the running call
  std::vector<int> pending_;  // ranks to which a small payload was sent separately
  uint32_t calls_ = 0;        // calls so far, with few ranks
  uint32_t compared_ = 0;     // number of the last compared call
  uint32_t reposted_ = 0;     // number of the last call whose frame was posted again
  uint32_t awaited_ = 0;      // number of the awaited call
  Mismatches mismatches_{rank_, kMostAhead};
  // last_: the latest call that all ranks have made. received_at_: its arrival time.
  CallReport last_;
  Clock::time_point received_at_;
  // scratch_: received chunks of each peer in large reductions. The memory is kept between calls.
  std::unique_ptr<char[]> scratch_;
  std::vector<Buffer> rooms_;
  size_t taken_ = 0;  // number of chunks taken from each peer
};

}  // namespace fl

// The collectives, each written once on a Mesh.
#pragma once

#include "../common/ahead.h"
#include "mesh.h"
#include "relay.h"

namespace fl {

// Large arrays move in pieces, so that one is used while the next is on the wire.
constexpr size_t kChunkBytes = 512 << 10;

// A run of bytes in an array; and one for each rank.
struct Part {
  size_t begin = 0;
  size_t bytes = 0;
};
using Parts = std::vector<Part>;

// One behind the other, each with as many bytes as `bytes(rank)` says.
template <typename Bytes>
Parts in_a_row(int ranks, Bytes bytes) {
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

// One operation as it runs.
struct Call {
  const fl_signature& mine;
  const fl_site& site;
  Seen& seen;  // gets what every rank calls, or after a timeout has called last
  Waiter& waiter;

  size_t bytes() const { return static_cast<size_t>(mine.count) * mine.itemsize; }
};

// Each throws Failure, or Mismatch before any payload has moved, or what Gloo throws where a
// connection is broken already. One thread at a time may call.
class Collectives {
 public:
  explicit Collectives(Mesh& mesh);
  ~Collectives();

  // Post the receives of the first headers; once, when every peer is connected.
  void open();
  // Have what was sent by calls that have returned be on its way, or wait until `end` for that.
  void flush(Clock::time_point end) noexcept;

  // Whether `rank` has announced a call that this rank has not made yet, and which. No other call
  // may run meanwhile.
  bool is_ahead(int rank, fl_signature& call) const;

  // What the other ranks have called last, as far as is known here, and how long ago.
  Seen last_calls() const;

  // The verbs; see common/verbs.h.
  void barrier(Call& call);
  void all_reduce(Call& call, void* data);
  void reduce(Call& call, void* data);
  void scan(Call& call, void* data);
  void reduce_scatter(Call& call, const void* data, void* output);
  void reduce_scatter_uneven(Call& call, const fl_sections& sections, void* output);
  Bytes broadcast(Call& call, void* data);
  // Where `room` has the size of what comes, it is filled, and the result is empty.
  Bytes all_gather(Call& call, const void* data, const fl_room* room);
  Bytes gather(Call& call, const void* data, const fl_room* room);
  Bytes scatter(Call& call, const void* data, void* output);
  void all_to_all(Call& call, const void* data, void* output);
  void all_to_all_uneven(Call& call, const fl_sections& sections, void* output);

 private:
  // Payloads up to this size travel inside the header, in one step instead of two. Copying more
  // takes longer than the step.
  static constexpr size_t kInlineBytes = 65 << 10;
  // Of how many calls a rank that needs none of the others' may be ahead. In twice as many places theirs can
  // arrive unasked: who sends that of a call has those of the call kMostAhead + 1 before, whose ranks by then
  // have compared what was kMostAhead + 1 before that, and are done with what came with it.
  static constexpr uint32_t kMostAhead = 31, kTurns = 2 * (kMostAhead + 1);
  // Of how many calls what this rank sends may wait for the kernel to take it.
  static constexpr uint32_t kLeaving = 8;
  // Headers that nobody waits for go at leisure, but for one of so many calls.
  static constexpr uint32_t kHurryEvery = 16;
  // How a rank has called: it waits for all others, or may return before they have called.
  enum How : uint32_t { kWaits, kRunsAhead };
  struct Frame {
    fl_signature signature;
    How how;
    uint32_t site_bytes;
    char rest[sizeof(fl_site) + kInlineBytes];  // of where it calls the text, and what it gives

    const char* payload() const { return rest + site_bytes; }
    void set_site(const fl_site& site);
    fl_site site() const;
  };
  struct Unmap {
    size_t bytes;
    void operator()(Frame* memory) const;
  };
  using Frames = std::unique_ptr<Frame[], Unmap>;
  struct Made {
    fl_signature signature;
    fl_site site;
    How how;
  };
  class ReductionInParts;

  void meet(Call& call, const void* data, const Parts& give);
  void begin();
  void enter(Call& call, const void* data, const Parts& give);
  void announce(const fl_signature& mine, const fl_site& site, const void* data, const Parts& give, How how);
  void await_leaving(int r);
  template <typename Send>
  void unless_left(int r, Send send);
  Ranks needed_by(int rank, const fl_signature& call) const;
  bool receive_some(Call& call, Ranks needed);
  void receive_all(Call& call);
  void wait_for(uint32_t number, int r);
  bool has_arrived(uint32_t number, int r) const;
  bool all_have_called(uint32_t number) const;
  Seen seen_in(uint32_t number) const;
  bool compare_call(uint32_t number);
  How how_of(int r, uint32_t number) const;
  void raise_news(const Call& call);
  void raise_earlier(std::optional<Differing::Call> found) const;
  size_t common_bytes(const Parts& give) const;
  void pass_on(Call& call, const void* data, const Parts& give, size_t bytes);
  void give_each(const void* data, const Parts& give);
  void fetch(const Parts& take);
  // Rank r's, small and fetched; until the next call.
  const char* payload(int r) const;
  void await_given();
  void post_header(int r, uint32_t number, bool tells);
  static Frames frames(size_t count);
  uint32_t turns() const { return passes_on_ ? 1 : kTurns; }
  const Frame& incoming(int r, uint32_t number) const { return incoming_[r * turns() + number % turns()]; }
  std::vector<int> not_arrived(const Call& call);
  void remember(Call& call);

  Parts same_for_all(size_t bytes) const;
  Parts equal_sections(size_t bytes) const;

  void reduce_inline(const Call& call, const void* data, size_t skip, size_t count, void* into);
  void scan_inline(const Call& call, void* data);
  void reduce_sections(Call& call, const void* data, void* output, const Parts& sections);
  void reduce_in_parts(Call& call, const void* data, char* output, const Parts& parts, int collector);
  gloo::transport::UnboundBuffer& room(int r);
  void make_rooms();
  void ask_for_piece(size_t at);

  void deliver(Call& call, const void* from, const Parts& give, void* into, const Parts& take);
  void move_large(Call& call, const void* from, const Parts& give, char* into, const Parts& take);
  void give_parts(Call& call, const void* data, size_t bytes, const Parts& parts);
  void pass_on_part(Call& call, char* data, const Parts& parts);
  Bytes gather_to(Call& call, const void* data, bool wanted, const Parts& give, const fl_room* room);

  Mesh& mesh_;
  const int rank_;
  const int size_;
  const bool passes_on_;  // what ranks call goes by others: see Relay
  bool compares_at_once_ = false;  // no call ends before all ranks have made it
  bool has_begun_ = false;
  // By peer and call. Memory that no payload reaches is never touched.
  Frames outgoing_, incoming_;
  // By peer: all its frames; of how many calls some are on their way; the last that was waited for.
  std::vector<Buffer> outgoing_buffers_, incoming_buffers_;
  std::vector<uint32_t> leaving_, received_;
  std::vector<Made> made_;  // this rank's last calls, as far as they may not be compared
  Relay relay_;
  Waiter* waiter_ = nullptr;  // of the call that runs
  std::vector<int> given_;    // to whom, of what was small and did not go by all
  uint32_t calls_ = 0;        // so far, of few ranks
  uint32_t compared_ = 0;     // of these, in which all ranks' calls are known
  uint32_t asked_ = 0;        // of these, in place of whose headers later ones have been asked for
  uint32_t awaited_ = 0;      // whose headers are waited for
  Differing differing_{rank_, kMostAhead};
  // The last call that all have made, and when it arrived.
  Seen last_;
  Clock::time_point received_at_;
  // Of large reductions: what came from each peer, kept from one to the next.
  std::unique_ptr<char[]> scratch_;
  std::vector<Buffer> rooms_;
  size_t taken_ = 0;  // of the pieces that came from each
};

}  // namespace fl

// Collectives between the ranks of one host, on top of a Segment. entering.cc: start of a call.
// collectives.cc: access to large arrays of other ranks. Other files: the verbs.
#pragma once

#include "../common/ahead.h"
#include "../common/operation.h"
#include "../common/choice.h"
#include "peers.h"
#include "remote.h"
#include "segment.h"

namespace fl {

// Maximum number of chunks between the stages of a pipeline, so that a rank has work if others are late.
constexpr uint32_t kAhead = 2;
static_assert(kAhead < kSlots, "a slot is filled again only when its chunk was drained");

// Maximum number of ranks for which one rank reduces all arrays. With more ranks, every rank reduces a part.
constexpr int kFewRanks = sized(4, 3);

// Shared memory with one array per rank: see Collectives::add_region.
struct Region {
  std::shared_ptr<Mapping> mapping;  // null after drop_region()
  size_t stride;                     // bytes from one rank's array to the next
};

// Flags in Call::kind. entering.cc has more.
constexpr uint32_t kIsLarge = 1u << 30;  // the call has the address of the data, not the data
constexpr uint32_t kCanRead = 1u << 31;  // this rank can read the memory of all ranks

// Calls that this rank needs. kAwaited: some are missing. kCalled: all have come. kComplete: with their data.
enum class Progress { kAwaited, kCalled, kComplete };

// The collectives of one group. Call begin() before each call. If calls differ, a verb throws Mismatch before
// it changes data. It may also throw Failure. Not thread-safe.
class Collectives {
 public:
  Collectives(Segment& segment, Peers& peers, Remote& remote, int rank, int size);

  // Prepare the next call. Each wait has a timeout of `seconds`. `interrupt`: check for signals, or null.
  void begin(double seconds, InterruptCheck interrupt);

  // Announce this rank's call and return immediately. Then call the function of the verb; progress() may be
  // called in between. `site` is the call site and must exist until the end of the call. If it is null, this
  // rank waits for all ranks even if it needs no other rank.
  void call(const fl_signature& signature, const void* data, const fl_site* site, bool is_ahead = false);
  // True if the call can be announced immediately with all its data.
  bool can_begin(const fl_signature& signature);
  // Continue the announced call, perhaps on another thread. Both parameters replace the values of begin().
  void go_on(double seconds, InterruptCheck interrupt);
  Progress progress();
  // From now on, let each call wait until all ranks have made it.
  void compare_at_once() { compares_at_once_ = true; }

  // The functions of the verbs. Use them after call(); see common/verbs.h.
  void barrier(const fl_signature& signature) { receive_calls(signature); }
  void all_reduce(const fl_signature& signature, void* data);
  void reduce(const fl_signature& signature, void* data);
  void scan(const fl_signature& signature, void* data);
  void reduce_scatter(const fl_signature& signature, const void* data, void* output);
  void reduce_scatter_uneven(const fl_signature& signature, const fl_sections& sections, void* output);
  // If this rank does not know the size, `data` is null, and the result contains the data.
  Bytes broadcast(const fl_signature& signature, void* data);
  // If `room` is null or has another size than the received data, the result contains the data.
  Bytes all_gather(const fl_signature& signature, const void* data, const fl_room* room);
  Bytes gather(const fl_signature& signature, const void* data, const fl_room* room);
  // If `output` is null, the result contains this rank's part.
  Bytes scatter(const fl_signature& signature, const void* data, void* output);
  void all_to_all(const fl_signature& signature, const void* data, void* output);
  void all_to_all_uneven(const fl_signature& signature, const fl_sections& sections, void* output);

  std::vector<fl_signature> calls() const { return calls(calls_); }
  // After a mismatch: publish this rank's call site.
  void publish_site(const fl_site& site);
  // Return the current calls with their sites. Wait some seconds for ranks whose site is missing.
  CallReport current_report() { return report_of(calls_); }
  // Return the last call of every rank with its age.
  CallReport last_calls() const;

  // If `rank` has made a call that this rank has not made yet, store it in `call` and return true.
  bool is_ahead(int rank, fl_signature& call) const;

  // Compare the calls that this rank made before other ranks. Return true if a rank has not made all of them
  // yet. Throws Mismatch if calls differ, or Failure if a rank is more than `seconds` late.
  bool look_back(double seconds);

  // Add shared memory for in-place reductions, and return this rank's array in it. All ranks must add the
  // same regions in the same order.
  void* add_region(std::shared_ptr<Mapping> mapping, size_t stride);
  void drop_region(const void* array);

 private:
  struct Chunks;
  struct Rows;
  struct Sections;
  struct Routes;
  // A rank's data, and the number of its bytes that are sent with the call.
  struct Outgoing {
    const void* data;
    size_t inline_bytes;
  };
  struct Payload {
    bool is_used;
    uint32_t call;  // number of the last call that used this payload
  };
  const Call& call_of(int rank, uint32_t number) const {
    return segment_.block(rank).calls[number % kCalls];
  }
  const Call& call_of(int rank) const { return call_of(rank, calls_); }
  Description& description_of(int rank, uint32_t number) const {
    return segment_.block(rank).descriptions[number % kCalls];
  }
  const char* inline_data(int rank, size_t bytes) const;
  bool travels_whole(const fl_signature& signature) const;
  size_t bytes_with_call(const fl_signature& signature) const;
  Outgoing outgoing_of(const fl_signature& signature, const void* data) const;
  Outgoing sections_in(const fl_signature& signature, const void* data) const;
  Ranks needed_by(int rank, const fl_signature& call) const;
  bool find_room(size_t inline_bytes);
  void wait_for_room(size_t inline_bytes);
  bool find_payload();
  void announce(const fl_signature& signature, const Outgoing& outgoing, const fl_site* site);
  void write_call(const fl_signature& signature, const Outgoing& outgoing, const fl_site* site, int64_t now);
  void announce_large(const fl_signature& signature, const void* data, Call& call);
  void show_waiting();
  static int key_of(const fl_signature& signature, const Call& call);
  void receive_calls(const fl_signature& signature);
  void receive_some(const fl_signature& signature);
  void compare_all();
  void compare_earlier(uint32_t number);
  void wait_for_all(Watch watch, uint32_t number);
  bool all_have_called(uint32_t number) const;
  bool compare_call(uint32_t number);
  std::vector<fl_signature> calls(uint32_t number) const;
  [[noreturn]] void raise_now();
  CallReport report_of(uint32_t number);
  bool has_site(int rank, uint32_t number);
  bool raises_itself(int rank, uint32_t number) const;
  uint64_t location_of(const void* data) const;
  bool all_in_one_region() const;
  char* in_region(int rank) const;

  void reduce_inline(const fl_signature& signature, const void* data, size_t skip, size_t count, void* into);
  void reduce_in_place(const fl_signature& signature, void* data);
  void reduce_in_parts(const fl_signature& signature, char* data, int collector);
  void reduce_large(const fl_signature& signature, void* data);
  void combine_shown(const fl_signature& signature, char* data, size_t chunk_bytes, int terms, bool shows,
                     bool combines);
  void reduce_terms(const fl_signature& signature, void* into, int terms, size_t count);
  void scan_in_parts(const fl_signature& signature, char* data, int terms);
  void reduce_read(const fl_signature& signature, size_t begin, const char* own_data, size_t count, char* into);

  Bytes gather_to(const fl_signature& signature, const void* data, const fl_room* room, bool receives);
  void move_rows(const fl_signature& signature, const Rows& rows, const void* data, char* into);
  void stream_rows(const Rows& rows, const char* data, char* into);
  void pass_rows(uint32_t number);
  void pass_chunks(uint32_t chunks);
  void exchange_sections(const fl_signature& signature, const Sections& sections, const void* data, void* output);
  void reduce_sections(const fl_signature& signature, const Sections& sections, const void* data, void* output);
  void move_sections(const fl_signature& signature, const Sections& sections, const void* data, void* output);
  void read_sections(const Sections& sections, const char* data, char* into);
  Routes routes_of(const Sections& sections) const;
  void stream_sections(const Routes& routes, const void* data, const std::function<void(uint32_t)>& consume);

  // Choose how the data of a large call is copied.
  CopyPath choose(const fl_signature& signature, size_t bytes, bool may_read = true) {
    return choose_in(calls_, signature, bytes, may_read);
  }
  CopyPath choose_in(uint32_t number, const fl_signature& signature, size_t bytes, bool may_read);
  // True if `rank` reads this rank's data in the current call.
  bool reads(int rank) const {
    return rank != rank_ && (only_reader_ < 0 || rank == only_reader_);
  }
  void read(int rank, size_t begin, void* into, size_t bytes);
  void request_read(int rank, size_t begin, char* into, size_t bytes);
  bool serve();
  void end_reading(bool has_data);

  using Produce = std::function<void(uint32_t chunk, char* slot)>;
  using Consume = std::function<void(uint32_t chunk, uint32_t filled)>;
  using Stage = std::function<void(uint32_t chunk)>;
  void stream(size_t chunks, bool produces, bool consumes, const Produce& produce, const Consume& consume);
  void stream_parts(uint32_t number, const Produce& fill, const Stage& combine, const Stage& collect);
  size_t chunk_for(size_t bytes) const;
  void wait_for_free_slot(uint32_t chunk);
  void show(void* slot, const void* data, size_t bytes) const;

  Segment& segment_;
  Peers& peers_;
  Remote& remote_;
  Watch watch_;
  const int rank_, size_;
  uint32_t calls_ = 0;     // number of calls that this rank has announced
  uint32_t compared_ = 0;  // number of the last compared call
  Ranks needed_;           // ranks whose calls the current call needs
  bool is_shown_ = true;   // false: the current call, stored below, waits for space
  fl_signature waiting_{};
  const void* waiting_data_ = nullptr;
  const fl_site* waiting_site_ = nullptr;
  std::array<Payload, kPayloads> payloads_{};
  uint32_t payload_ = 0;  // index of a free payload after find_payload()
  Mismatches mismatches_{rank_, kMostAhead};
  std::optional<Mismatches::Call> news_;  // an earlier mismatch that the current call raises
  bool compares_at_once_ = false;
  int only_reader_ = -1;         // the only reader of this rank's data; -1: all ranks
  uint32_t chunks_ = 0;          // number of chunks of all calls so far
  std::vector<Region> regions_;  // dropped regions stay, with a null mapping
  std::vector<const void*> from_;
  Choice choice_;
  Choice::Trial trial_;  // copy path of the current call
  std::vector<char> scratch_;
};

}  // namespace fl

// The collectives between the ranks of one host, each written once on a Segment.
//
// entering.cc: how a call is entered; collectives.cc: the memory of large arrays; the others: the verbs.
#pragma once

#include "../common/ahead.h"
#include "../common/operation.h"
#include "../common/choice.h"
#include "peers.h"
#include "remote.h"
#include "segment.h"

namespace fl {

// A pipeline stage runs this many chunks ahead of the next, to have work while peers catch up.
constexpr uint32_t kAhead = 2;
static_assert(kAhead < kSlots, "a slot is filled again only when its chunk was drained");

// So many arrays one rank combines by itself; of more, everybody combines a part.
constexpr int kFewRanks = sized(4, 3);

// Memory that holds one array of each rank, mapped by all: see Collectives::add_region.
struct Region {
  std::shared_ptr<Mapping> mapping;  // shared with whoever uses the array; null once dropped
  size_t stride;                     // bytes from one rank's array to the next
};

// What a rank says with the kind of its call, among others; see entering.cc.
constexpr uint32_t kIsLarge = 1u << 30;  // its data does not come with it, but its address
constexpr uint32_t kCanRead = 1u << 31;  // it can read the memory of all others

// Of the other ranks' calls, those that this rank needs: not all are there yet; all are; and so is all that
// they bring.
enum class Progress { kAwaited, kCalled, kComplete };

// All throw Failure, or Mismatch before anything has changed. One thread at a time may call, and
// says how long with begin() first.
class Collectives {
 public:
  Collectives(Segment& segment, Peers& peers, Remote& remote, int rank, int size);

  // The next call: each of its waits may take `seconds`, and be interrupted on the caller's thread.
  void begin(double seconds, InterruptCheck interrupt);

  // The first step of every verb: show the others what this rank calls, without waiting. The verb's
  // own function does the rest; in between, progress() says how far the others are. `site`, which lives as
  // long as the call, is where the program calls; null: where this rank needs nobody it waits for all then.
  void call(const fl_signature& mine, const void* data, const fl_site* site, bool is_ahead = false);
  // Whether all that this rank has for the others goes with that, at once.
  bool can_begin(const fl_signature& mine);
  // Later, and maybe on another thread, before the rest: as begin() for the call that was made.
  void go_on(double seconds, InterruptCheck interrupt);
  Progress progress();
  // From now on no call ends before all others have called.
  void compare_at_once() { compares_at_once_ = true; }

  // The verbs, whose call has been made; see common/verbs.h.
  void barrier(const fl_signature& mine) { receive_calls(mine); }
  void all_reduce(const fl_signature& mine, void* data);
  void reduce(const fl_signature& mine, void* data);
  void scan(const fl_signature& mine, void* data);
  void reduce_scatter(const fl_signature& mine, const void* data, void* output);
  void reduce_scatter_uneven(const fl_signature& mine, const fl_sections& sections, void* output);
  // A rank that does not know what comes has no `data`: it is returned.
  Bytes broadcast(const fl_signature& mine, void* data);
  // Where `room` is null, or what comes does not fit exactly, it is returned.
  Bytes all_gather(const fl_signature& mine, const void* data, const fl_room* room);
  Bytes gather(const fl_signature& mine, const void* data, const fl_room* room);
  // Where `output` is null, the part is returned.
  Bytes scatter(const fl_signature& mine, const void* data, void* output);
  void all_to_all(const fl_signature& mine, const void* data, void* output);
  void all_to_all_uneven(const fl_signature& mine, const fl_sections& sections, void* output);

  // What every rank calls now.
  std::vector<fl_signature> calls() const { return calls(calls_); }
  // After a mismatch: let the others know where this rank has called.
  void place(const fl_site& site);
  // What every rank calls now, and where. Waits until all have said that, but not for long.
  Seen seen_now() { return seen_in(calls_); }
  // The last call of every rank, and how long ago it was.
  Seen last_calls() const;

  // Whether `rank` has made a call that this rank has not made yet, and which.
  bool is_ahead(int rank, fl_signature& call) const;

  // Compare the calls that this rank has made ahead of others; whether some ranks have not made one of them.
  // Throws Mismatch if the ranks differ in a call, or Failure if a rank has not made one for so long.
  bool look_back(double seconds);

  // Arrays in this memory are reduced where they are. Collective in effect: every rank adds the
  // same regions in the same order. Returns this rank's array.
  void* add_region(std::shared_ptr<Mapping> mapping, size_t stride);
  void drop_region(const void* array);

 private:
  struct Chunks;
  struct Rows;
  struct Sections;
  struct Routes;
  // What a rank has for the others, and how much of it goes with its call.
  struct Given {
    const void* data;
    size_t inline_bytes;
  };
  struct Payload {
    bool is_used;
    uint32_t call;  // the last with data in it
  };
  const Call& call_of(int rank, uint32_t number) const {
    return segment_.block(rank).calls[number % kCalls];
  }
  const Call& call_of(int rank) const { return call_of(rank, calls_); }
  Description& description_of(int rank, uint32_t number) const {
    return segment_.block(rank).descriptions[number % kCalls];
  }
  const char* inline_data(int rank, size_t bytes) const;
  bool travels_whole(const fl_signature& mine) const;
  size_t bytes_with_call(const fl_signature& mine) const;
  Given given_in(const fl_signature& mine, const void* data) const;
  Given sections_in(const fl_signature& mine, const void* data) const;
  Ranks needed_by(int rank, const fl_signature& call) const;
  bool find_room(size_t inline_bytes);
  void wait_for_room(size_t inline_bytes);
  bool find_payload();
  void announce(const fl_signature& mine, const Given& given, const fl_site* site);
  void write_call(const fl_signature& mine, const Given& given, const fl_site* site, int64_t now);
  void announce_large(const fl_signature& mine, const void* data, Call& call);
  void show_waiting();
  void wait_and_show();
  static int key_of(const fl_signature& mine, const Call& call);
  void receive_calls(const fl_signature& mine);
  void receive_some(const fl_signature& mine);
  void compare_all();
  void compare_earlier(uint32_t number);
  void wait_for_all(Watch watch, uint32_t number);
  bool all_have_called(uint32_t number) const;
  bool compare_call(uint32_t number);
  bool all_call_the_same(uint32_t number) const;
  std::vector<fl_signature> calls(uint32_t number) const;
  [[noreturn]] void raise_now();
  Seen seen_in(uint32_t number);
  bool is_placed(int rank, uint32_t number);
  bool sees_mismatch(int rank, uint32_t number) const;
  uint64_t place_of(const void* data) const;
  bool all_in_one_place() const;
  char* in_region(int rank) const;

  void reduce_inline(const fl_signature& mine, const void* data, size_t skip, size_t count, void* into);
  void reduce_in_place(const fl_signature& mine, void* data);
  void reduce_in_parts(const fl_signature& mine, char* data, int collector);
  void reduce_large(const fl_signature& mine, void* data);
  void combine_seen(const fl_signature& mine, char* data, size_t chunk_bytes, int terms, bool seen, bool sees);
  void reduce_terms(const fl_signature& mine, void* into, int terms, size_t count);
  void scan_in_parts(const fl_signature& mine, char* data, int terms);
  void reduce_read(const fl_signature& mine, size_t begin, const char* own, size_t count, char* into);

  Bytes gather_to(const fl_signature& mine, const void* data, const fl_room* room, bool wanted);
  void move_rows(const fl_signature& mine, const Rows& rows, const void* data, char* into);
  void stream_rows(const Rows& rows, const char* data, char* into);
  void pass_rows(uint32_t number);
  void pass_chunks(uint32_t chunks);
  void exchange_sections(const fl_signature& mine, const Sections& sections, const void* data, void* output);
  void reduce_sections(const fl_signature& mine, const Sections& sections, const void* data, void* output);
  void move_sections(const fl_signature& mine, const Sections& sections, const void* data, void* output);
  void read_sections(const Sections& sections, const char* data, char* into);
  Routes routes_of(const Sections& sections) const;
  void stream_sections(const Routes& routes, const void* data, const std::function<void(uint32_t)>& consume);

  // Large calls: the way of the data, and reading it from other ranks' memory.
  Way choose(const fl_signature& mine, size_t bytes, bool may_read = true);
  Way choose_in(uint32_t number, const fl_signature& mine, size_t bytes, bool may_read);
  // Whether `rank` reads what this one shows in the running call.
  bool reads(int rank) const {
    return rank != rank_ && (only_reader_ < 0 || rank == only_reader_);
  }
  void read(int rank, size_t begin, void* into, size_t bytes);
  void ask_for(int rank, size_t begin, char* into, size_t bytes);
  bool serve();
  void end_reading();

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
  Watch watch_;  // of the running call
  const int rank_, size_;
  uint32_t calls_ = 0;     // calls of this group so far that this rank has shown
  uint32_t compared_ = 0;  // up to which they were compared with the others'
  Ranks needed_;           // by the running call
  bool is_shown_ = true;   // it; else there was no room for it:
  fl_signature waiting_{};
  const void* waiting_data_ = nullptr;
  const fl_site* waiting_site_ = nullptr;
  std::array<Payload, kPayloads> payloads_{};
  uint32_t payload_ = 0;  // a free one
  Differing differing_{rank_, kMostAhead};
  std::optional<Differing::Call> news_;  // an earlier call whose mismatch the running one raises
  bool compares_at_once_ = false;
  int only_reader_ = -1;  // of what this rank shows in the running call; -1: all read it
  uint32_t chunks_ = 0;  // chunks that have gone through the slots so far
  std::vector<Region> regions_;  // never moved: a dropped one stays, empty
  std::vector<const void*> from_;
  Choice choice_;
  Choice::Trial trial_;  // the running call's
  std::vector<char> scratch_;
};

}  // namespace fl

// Collectives in the model. Expected: correct results, or a failure that names the rank that has vanished.

#include "member.h"

namespace {

using namespace model;

// The element of one rank's array in one call.
int32_t value(int rank, int call, size_t k) { return 1000 * (rank + 1) + 100 * call + static_cast<int32_t>(k % 50); }

int32_t sum(int ranks, int call, size_t k) {
  int32_t result = 0;
  for (int r = 0; r < ranks; ++r) result += value(r, call, k);
  return result;
}

// One collective call: its arrays and their expected contents.
struct Call {
  Member& me;
  const int verb, number, root;
  const size_t count;  // per rank or per section
  fl_signature s;
  std::vector<int32_t> data, output, wanted;
  std::vector<int64_t> sections;
  fl_sections given{};
  bool is_gathered = false;

  Call(Member& me, int verb, size_t count, int number)
      : me(me), verb(verb), number(number), root(me.ranks - 1), count(count), s(signature(verb, count)) {
    const int rank = me.rank, ranks = me.ranks;
    const auto fill = [&](size_t n) {
      for (size_t k = 0; k < n; ++k) data.push_back(value(rank, number, k));
    };
    const auto want = [&](size_t n, auto make) {
      for (size_t k = 0; k < n; ++k) wanted.push_back(make(k));
    };
    const auto set_count = [&](size_t n) { s.count = s.shape[0] = static_cast<int64_t>(n); };
    const auto rooted = [&] { s.root = root; };
    const auto row = [&](int r) { return count + static_cast<size_t>(r); };  // if uneven
    // Put row(r) elements per rank r; return the index of the first one for this rank.
    const auto fill_unevenly = [&] {
      for (int i = 0; i < ranks * ranks; ++i) sections.push_back(static_cast<int64_t>(4 * row(i % ranks)));
      size_t all = 0, before = 0;
      for (int r = 0; r < ranks; ++r) {
        if (r < rank) before += row(r);
        all += row(r);
      }
      set_count(all);
      fill(all);
      return before;
    };
    switch (verb) {
      case FL_BARRIER:
        s.ndim = s.itemsize = 0;
        s.dtype = 0;
        break;
      case FL_ALL_REDUCE:
        fill(count);
        want(count, [&](size_t k) { return sum(ranks, number, k); });
        break;
      case FL_REDUCE:
        rooted();
        fill(count);
        if (rank == root) want(count, [&](size_t k) { return sum(ranks, number, k); });
        break;
      case FL_SCAN:
        fill(count);
        want(count, [&](size_t k) { return sum(rank + 1, number, k); });
        break;
      case FL_EXSCAN:
        fill(count);
        want(count, [&](size_t k) { return rank == 0 ? value(0, number, k) : sum(rank, number, k); });
        break;
      case FL_BROADCAST:
        rooted();
        fill(count);
        want(count, [&](size_t k) { return value(root, number, k); });
        break;
      case FL_REDUCE_SCATTER:
        set_count(count * ranks);
        fill(count * ranks);
        output.resize(count);
        want(count, [&](size_t k) { return sum(ranks, number, count * rank + k); });
        break;
      case FL_REDUCE_SCATTER_UNEVEN: {
        const size_t before = fill_unevenly();
        output.resize(row(rank));
        want(row(rank), [&](size_t k) { return sum(ranks, number, before + k); });
        break;
      }
      case FL_GATHER:
        rooted();
        [[fallthrough]];
      case FL_ALL_GATHER:
        set_count(row(rank));
        fill(row(rank));
        is_gathered = verb == FL_ALL_GATHER || rank == root;
        for (int r = 0; is_gathered && r < ranks; ++r) want(row(r), [&](size_t k) { return value(r, number, k); });
        break;
      case FL_SCATTER:
        rooted();
        if (rank == root) fill(count * ranks);
        output.resize(count);
        want(count, [&](size_t k) { return value(root, number, count * rank + k); });
        break;
      case FL_ALL_TO_ALL:
        set_count(count * ranks);
        fill(count * ranks);
        output.resize(count * ranks);
        for (int r = 0; r < ranks; ++r) want(count, [&](size_t k) { return value(r, number, count * rank + k); });
        break;
      case FL_ALL_TO_ALL_UNEVEN: {
        const size_t before = fill_unevenly();
        output.resize(row(rank) * ranks);
        for (int r = 0; r < ranks; ++r) want(row(rank), [&](size_t k) { return value(r, number, before + k); });
        break;
      }
    }
    if (!sections.empty()) given = {data.data(), sections.data()};
  }

  void* in() { return sections.empty() ? static_cast<void*>(data.data()) : &given; }
  void* out() { return output.empty() ? nullptr : output.data(); }

  // Return true on success. On failure the arrays may still be in use.
  bool end(const fl::Handle& handle) {
    const bool goes_on = me.settle(outcome_of(handle));
    if (goes_on) {
      const int32_t* got = output.empty() ? data.data() : output.data();
      if (is_gathered) {
        check(handle != nullptr, "nothing was gathered");
        check(handle->outcome().output.size == 4 * wanted.size(), "as many bytes were gathered as never given");
        got = reinterpret_cast<const int32_t*>(handle->outcome().output.data.get());
      }
      for (size_t k = 0; k < wanted.size(); ++k) {
        if (got[k] != wanted[k]) {
          fail("element " + std::to_string(k) + " is " + std::to_string(got[k]) + " instead of " +
               std::to_string(wanted[k]));
        }
      }
    }
    for (int32_t& one : data) one = -1;
    for (int32_t& one : output) one = -1;
    return goes_on;
  }

  fl::Handle run(const fl_site* site = &kHere) {
    return me.group->run({s, in(), out(), -1, kForever, site});
  }
  fl::Handle start() { return me.group->start({s, in(), out(), -1, kForever, &kHere}); }
};

// Consecutive calls of one verb.
template <int ranks, int verb, size_t count, int calls, int choices = 0>
void collective(int rank) {
  Member me(rank, ranks, choices);
  begin();
  for (int i = 0; i < calls; ++i) {
    Call* const call = new Call(me, verb, count, i);
    if (!call->end(call->run())) return;
  }
}

// Numbers of 4-byte elements: in the line of the call; beside it; in several chunks; in more than all slots.
constexpr size_t kTiny = 2, kInline = 6, kSome = 40, kLarge = 200, kMany = 480;
// Initial number of calls after which the next call reads the memory of other ranks.
constexpr int kReads = 3;

#define COLLECTIVE(title, verb, count, choices, two, three)                                                     \
  {.name = title "/2x2", .ranks = 2, .run = collective<2, verb, count, 2, choices>, .share = two,               \
   .is_small = count <= kInline, .vanishing = 1},                                                               \
  {.name = title "/3x1", .ranks = 3, .run = collective<3, verb, count, 1, choices>, .share = three,             \
   .is_small = count <= kInline, .vanishing = choices > 0 ? 4 : 1}
const Case collectives[] = {
    COLLECTIVE("barrier", FL_BARRIER, 0, 0, 1, 4),
    COLLECTIVE("all_reduce_tiny", FL_ALL_REDUCE, kTiny, 0, 1, 2),
    COLLECTIVE("all_reduce_inline", FL_ALL_REDUCE, kInline, 0, 1, 2),
    COLLECTIVE("all_reduce_large", FL_ALL_REDUCE, kLarge, 0, 4, 4),
    COLLECTIVE("reduce_inline", FL_REDUCE, kInline, 0, 1, 2),
    COLLECTIVE("reduce_large", FL_REDUCE, kLarge, 0, 2, 2),
    COLLECTIVE("reduce_read", FL_REDUCE, kSome, kReads, 2, 2),
    COLLECTIVE("broadcast_inline", FL_BROADCAST, kInline, 0, 1, 2),
    COLLECTIVE("broadcast_large", FL_BROADCAST, kLarge, 0, 2, 2),
    COLLECTIVE("broadcast_read", FL_BROADCAST, kSome, kReads, 2, 2),
    COLLECTIVE("scan_inline", FL_SCAN, kInline, 0, 1, 2),
    COLLECTIVE("scan_large", FL_SCAN, kLarge, 0, 2, 2),
    COLLECTIVE("exscan_large", FL_EXSCAN, kSome, 0, 1, 1),
    COLLECTIVE("reduce_scatter_inline", FL_REDUCE_SCATTER, kTiny, 0, 1, 2),
    COLLECTIVE("reduce_scatter_large", FL_REDUCE_SCATTER, kLarge / 2, 0, 2, 2),
    COLLECTIVE("reduce_scatter_read", FL_REDUCE_SCATTER, kSome, kReads, 2, 2),
    COLLECTIVE("reduce_scatter_uneven", FL_REDUCE_SCATTER_UNEVEN, kSome, 0, 2, 2),
    COLLECTIVE("all_gather_inline", FL_ALL_GATHER, kInline, 0, 1, 2),
    COLLECTIVE("all_gather_large", FL_ALL_GATHER, kLarge, 0, 2, 2),
    COLLECTIVE("all_gather_read", FL_ALL_GATHER, kSome, kReads, 2, 2),
    COLLECTIVE("gather_inline", FL_GATHER, kInline, 0, 1, 2),
    COLLECTIVE("gather_large", FL_GATHER, kSome, 0, 2, 2),
    COLLECTIVE("scatter_inline", FL_SCATTER, kTiny, 0, 1, 2),
    COLLECTIVE("scatter_large", FL_SCATTER, kSome, 0, 2, 2),
    COLLECTIVE("all_to_all_inline", FL_ALL_TO_ALL, kTiny, 0, 1, 2),
    COLLECTIVE("all_to_all_large", FL_ALL_TO_ALL, kSome, 0, 2, 2),
    COLLECTIVE("all_to_all_read", FL_ALL_TO_ALL, kSome, kReads, 2, 2),
    COLLECTIVE("all_to_all_uneven", FL_ALL_TO_ALL_UNEVEN, kSome, 0, 2, 2),
};

// More calls than a rank may be ahead; in some of them it need not wait.
void run_ahead(Member& me) {
  for (int i = 0; i < 6; ++i) {
    Call* const call = new Call(me, i == 5 ? FL_BARRIER : i % 2 == 0 ? FL_BROADCAST : FL_GATHER, kInline, i);
    if (!call->end(call->run())) return;
  }
}

// Arrays in regions of all ranks are combined in place.
template <int ranks>
void in_place(int rank) {
  Member me(rank, ranks, 0);
  constexpr size_t kStride = 1024;
  auto mapping = std::make_shared<fl::Mapping>(map(1, rank, ranks * kStride));
  auto* const array = static_cast<int32_t*>(me.group->add_region(std::move(mapping), kStride));
  begin();
  for (int call = 0; call < 2; ++call) {
    for (size_t k = 0; k < kLarge; ++k) array[k] = value(rank, call, k);
    const fl_signature s = signature(FL_ALL_REDUCE, kLarge);
    if (!me.settle(outcome_of(me.group->run({s, array, nullptr, -1, kForever, &kHere})))) return;
    for (size_t k = 0; k < kLarge; ++k) check(array[k] == sum(ranks, call, k), "a wrong sum in place");
  }
}

// A rank with little data leaves a large gather before the others and counts its chunks later.
void passes_rows(Member& me) {
  Call* const call = new Call(me, FL_GATHER, me.rank == 0 ? kInline : kSome, 0);
  call->wanted.clear();
  for (size_t k = 0; me.rank == 1 && k < kInline; ++k) call->wanted.push_back(value(0, 0, k));
  for (size_t k = 0; me.rank == 1 && k < kSome + 1; ++k) call->wanted.push_back(value(1, 0, k));
  if (!call->end(call->run())) return;
  Call* const next = new Call(me, FL_ALL_GATHER, kSome, 1);
  next->end(next->run());
}

// Data that a rank cannot read from another rank is copied into a slot.
void unreadable(Member& me) {
  Call* const call = new Call(me, FL_ALL_GATHER, kSome, 0);
  call->end(call->run());
}

// Only the first of eight chunks may use a slice, or some, until the asked rank sees the request.
void soon_unreadable(Member& me) {
  const auto started = fl::Clock::now();
  Call* const call = new Call(me, FL_BROADCAST, kMany, 0);
  call->end(call->run());
  check(fl::Clock::now() - started < 6 * std::chrono::milliseconds(fl::kSliceMilliseconds),
        "each piece takes a slice");
}

// First call as soon as a rank has its group: other ranks may not have theirs yet, or not be readable.
void made_late(int rank) {
  fl::Mapping mapping = map(0, rank, fl::Segment::bytes_for(2));
  Member me(rank, 2, static_cast<fl::ShmGroup*>(nullptr));
  begin();
  me.group = std::make_unique<fl::ShmGroup>(std::move(mapping), rank, 2).release();
  Call* const call = new Call(me, FL_ALL_GATHER, kSome, 0);
  call->end(call->run());
}

// In two steps, between which the caller does something else.
void in_two_steps(Member& me) {
  for (int i = 0; i < 2; ++i) {
    Call* const call = new Call(me, FL_ALL_REDUCE, kInline, i);
    if (me.group->begin(call->s, call->in(), kForever, &kHere)) {
      me.group->ready(1);
      if (!call->end(fl::handle_of(me.group->finish(call->s, call->in(), call->out())))) return;
    } else if (!call->end(call->run())) {
      return;
    }
  }
}

// Started calls, waited for in order, or only after the next call.
template <size_t count, int calls, int verb = FL_ALL_REDUCE>
void started(Member& me) {
  Call* begun[calls];
  fl::Handle* const handles = new fl::Handle[calls];
  for (int i = 0; i < calls; ++i) {
    begun[i] = new Call(me, verb, count, i);
    handles[i] = begun[i]->start();
  }
  for (int i = 0; i < calls; ++i) {
    if (!begun[i]->end(handles[i])) return;
  }
}

void started_then_run(Member& me) {
  Call* const first = new Call(me, FL_ALL_REDUCE, kInline, 0);
  Call* const second = new Call(me, FL_ALL_REDUCE, kTiny, 1);
  const fl::Handle handle = first->start();
  const bool goes_on = second->end(second->run());
  if (first->end(handle)) check(goes_on, "the second call has failed, the first has not");
}

// Another thread waits for a call, or calls at the same time.
void waited_for_elsewhere(Member& me) {
  Call* const call = new Call(me, FL_ALL_REDUCE, kInline, 0);
  const fl::Handle handle = call->start();
  std::thread other([&] { call->end(handle); });
  other.join();
}

void two_threads(Member& me) {
  Call* const calls[] = {new Call(me, FL_BARRIER, 0, 0), new Call(me, FL_BARRIER, 0, 1)};
  std::thread other([&] { calls[0]->end(calls[0]->run()); });
  calls[1]->end(calls[1]->run());
  other.join();
}

// Ranks call different verbs: all ranks detect it and continue.
template <int ranks, int first, int second>
void mismatch(int rank) {
  Member me(rank, ranks, 0);
  begin();
  Call* const wrong = new Call(me, rank == 0 ? first : second, kTiny, 0);
  fl::Handle handle = wrong->run();
  const Outcome outcome = outcome_of(handle);
  const bool may_be_ahead = rank == 0 ? first == FL_BROADCAST || first == FL_GATHER || first == FL_SCAN
                                      : second == FL_BROADCAST || second == FL_GATHER || second == FL_SCAN;
  bool is_told = outcome.status == FL_MISMATCH;
  if (!is_told && !(may_be_ahead && outcome.status == FL_OK) && !me.settle(outcome)) return;
  check(is_told || may_be_ahead || vanished() >= 0, "a call that differs is not told of");
  Call* const right = new Call(me, FL_BARRIER, 0, 1);
  handle = right->run();
  const Outcome after = outcome_of(handle);
  if (after.status == FL_MISMATCH) {
    is_told = true;
  } else if (!me.settle(after)) {
    return;
  }
  check(is_told || vanished() >= 0, "nobody has told this rank that the calls differ");
}

const Case others[] = {
    {.name = "all_reduce_chunks/3x1", .ranks = 3, .run = collective<3, FL_ALL_REDUCE, kMany, 1>, .share = 2},
    {.name = "reduce_chunks/3x1", .ranks = 3, .run = collective<3, FL_REDUCE, kMany, 1>, .share = 2},
    {.name = "reduce_chunks/4x1", .ranks = 4, .run = collective<4, FL_REDUCE, kMany, 1>, .share = 2},
    {.name = "scan_chunks/3x1", .ranks = 3, .run = collective<3, FL_SCAN, kMany, 1>, .share = 2},
    {.name = "scan_chunks/4x1", .ranks = 4, .run = collective<4, FL_SCAN, kMany, 1>, .share = 2},
    {.name = "in_place/2", .ranks = 2, .run = in_place<2>, .share = 2},
    {.name = "in_place/3", .ranks = 3, .run = in_place<3>, .share = 2, .vanishing = 1},
    {.name = "passes_rows/2", .ranks = 2, .run = of_members<passes_rows>, .share = 2, .vanishing = 1},
    {.name = "run_ahead/2", .ranks = 2, .run = of_members<run_ahead>, .share = 4, .vanishing = 2},
    {.name = "unreadable/2", .ranks = 2, .run = of_members<unreadable, 2, kReads>,
     .share = 2, .late = true, .reads_fail = true, .vanishing = 1},
    {.name = "soon_unreadable/2", .ranks = 2, .run = of_members<soon_unreadable, 2, kReads>, .timers = 0, .late = true,
     .reads_fail = true},
    {.name = "made_late/2", .ranks = 2, .run = made_late, .share = 2},
    {.name = "in_two_steps/2", .ranks = 2, .run = of_members<in_two_steps>},
    {.name = "few_processors/2", .ranks = 2, .run = collective<2, FL_ALL_REDUCE, kTiny, 2>, .processors = 1},
    {.name = "started/2", .ranks = 2, .run = of_members<started<kInline, 1>>, .share = 4, .is_searched = false},
    {.name = "started_two/2", .ranks = 2, .run = of_members<started<kInline, 2>>,
     .share = 4, .is_searched = false, .vanishing = 2},
    {.name = "started_large/2", .ranks = 2, .run = of_members<started<kSome, 2>>, .share = 4, .is_searched = false},
    {.name = "started_barriers/2", .ranks = 2, .run = of_members<started<0, 3, FL_BARRIER>>,
     .share = 4, .is_searched = false},
    {.name = "started_then_run/2", .ranks = 2, .run = of_members<started_then_run>, .share = 4, .is_searched = false},
    {.name = "waited_for_elsewhere/2", .ranks = 2, .run = of_members<waited_for_elsewhere>,
     .share = 4, .is_searched = false},
    {.name = "two_threads/2", .ranks = 2, .run = of_members<two_threads>, .share = 4, .is_searched = false},
    {.name = "mismatch/2", .ranks = 2, .run = mismatch<2, FL_BARRIER, FL_ALL_REDUCE>, .share = 2},
    {.name = "mismatch/3", .ranks = 3, .run = mismatch<3, FL_BARRIER, FL_ALL_REDUCE>,
     .share = 2, .vanishing = 1},
    {.name = "mismatch_ahead/2", .ranks = 2, .run = mismatch<2, FL_BROADCAST, FL_GATHER>, .share = 2},
    {.name = "mismatch_ahead/3", .ranks = 3, .run = mismatch<3, FL_SCAN, FL_BARRIER>, .share = 2},
};

const Table all_collectives{collectives}, all_others{others};

}  // namespace

// A rank of a case of csrc/shm.
#pragma once

#include "../../../csrc/shm/group.h"
#include "../member.h"
#include "../reach.h"
#include "model.h"

namespace stress {

REACH(CollectivesOfGroup, fl::Collectives fl::ShmGroup::*, &fl::ShmGroup::collectives_);
REACH(ChoiceOfCalls, fl::Choice fl::Collectives::*, &fl::Collectives::choice_);
REACH(FamilyOfGroup, const std::shared_ptr<fl::Family> fl::ShmGroup::*, &fl::ShmGroup::family_);
REACH(EndsOfRings, std::unique_ptr<fl::Rings::Ends[]> fl::Rings::*, &fl::Rings::ends_);

}  // namespace stress

namespace model {

using stress::Outcome, stress::outcome_of;

constexpr double kForever = 100;
constexpr fl_site kHere{"here"};

inline fl_signature signature(int verb, size_t count) {
  return stress::signature_of(verb, FL_INT32, sizeof(int32_t), count);
}

inline fl::Mapping map(int number, int rank, size_t bytes) {
  const std::string path = "/model/" + std::to_string(number);
  return rank == 0 ? fl::Mapping::create(path, bytes) : fl::Mapping::open(path, bytes);
}

inline void free_group(fl::ShmGroup* group) { const std::unique_ptr<fl::ShmGroup> owned(group); }

// Let `milliseconds` pass, for threads that run concurrently.
inline void let_pass(int ticks) {
  constexpr int64_t kTick = 1000000;
  uint32_t* const word = new uint32_t(0);
  while (ticks-- > 0) fl::futex_wait(word, 0, kTick, fl::kAllBits, fl::FutexScope::kThreads);
}

struct Member {
  // `choices`: initial number of calls of each verb.
  Member(int rank, int ranks, int choices) : rank(rank), ranks(ranks), group(nullptr) {
    group = std::make_unique<fl::ShmGroup>(map(0, rank, fl::Segment::bytes_for(ranks)), rank, ranks).release();
    // The choice of rank 0 begins with direct reads of large messages, and the choice of other ranks with chunks.
    fl::Rings& rings = (group->*member_of(stress::FamilyOfGroup()))->rings;
    for (int r = 0; r < ranks; ++r) {
      (rings.*member_of(stress::EndsOfRings()))[r].choice = fl::Choice(2, rank == 0 ? 3 : 0);
    }
    if (choices == 0) return;
    fl::Collectives& collectives = group->*member_of(stress::CollectivesOfGroup());
    collectives.*member_of(stress::ChoiceOfCalls()) = fl::Choice(FL_VERBS, static_cast<uint32_t>(choices));
  }

  // Create a member without a group.
  Member(int rank, int ranks, fl::ShmGroup* group) : rank(rank), ranks(ranks), group(group) {}

  // Return true if a rank continues after a call; a failed call must name the vanished rank.
  bool settle(const Outcome& outcome, fl_status or_else = FL_PEER_LOST) const {
    if (outcome.status == FL_OK) return true;
    // A call after another thread's failed call reports the reason of that failure.
    const bool may_be = outcome.status == FL_PEER_LOST || outcome.status == FL_CLOSED || outcome.status == or_else;
    const bool is_lost = may_be && outcome.missing == std::vector<int>{vanished() - first};
    if (vanished() < 0 || !is_lost) {
      std::string ranks;
      for (const int r : outcome.missing) ranks += " " + std::to_string(r);
      fail("a call ends with status " + std::to_string(outcome.status) + " about ranks" + ranks + ": " +
           outcome.message);
    }
    gave_up();
    return false;
  }

  const int rank, ranks;
  fl::ShmGroup* group;  // never closed, unless a case closes it
  int first = 0;        // rank of the whole group that is rank 0 of this subgroup
};

// A case whose ranks are the members of one group.
template <void (*body)(Member& me), int ranks = 2, int choices = 0, bool syncs = false>
void of_members(int rank) {
  Member me(rank, ranks, choices);
  if (syncs) me.group->compare_at_once();
  begin();
  body(me);
}

}  // namespace model

// Comparison of the calls of two or more ranks.
#pragma once

#include <algorithm>

#include "abi.h"

namespace fl {

// Sequence number of call `number`, a counter that wraps. 0 is reserved for "no call".
inline uint64_t sequence_of(uint32_t number) { return number != 0 ? number : uint64_t{1} << 32; }

inline bool is_message(const fl_signature& call) { return call.verb == FL_SEND || call.verb == FL_RECV; }

// True if the first dimension of the arrays may differ between ranks.
inline bool first_dimension_is_free(int verb) {
  return verb == FL_ALL_GATHER || verb == FL_GATHER || verb == FL_ALL_TO_ALL_UNEVEN;
}

// True if only the root must know the dtype and shape of the data: see FL_ANY.
inline bool root_must_know(int verb) { return verb == FL_SCATTER || verb == FL_BROADCAST; }

// True if the call only compares signatures and moves no data: see FL_COMPARED.
inline bool is_compared(const fl_signature& call) { return (call.dtype & FL_COMPARED) != 0; }

// True if each rank needs the shapes of the other ranks' arrays.
inline bool shapes_are_wanted(int verb) { return first_dimension_is_free(verb) || verb == FL_SCATTER; }

inline bool same_call(const fl_signature& a, const fl_signature& b) {
  if (a.verb != b.verb || a.root != b.root || a.part_of != b.part_of) return false;
  if (a.ndim == FL_ANY || b.ndim == FL_ANY) return true;
  if (a.dtype != b.dtype || a.op != b.op || a.scale != b.scale || a.itemsize != b.itemsize || a.ndim != b.ndim) {
    return false;
  }
  const bool free = first_dimension_is_free(a.verb);
  if (!free && a.count != b.count) return false;
  const int dims = std::min(a.ndim, FL_DIMENSIONS);
  for (int d = free ? 1 : 0; d < dims; ++d) {
    if (a.shape[d] != b.shape[d]) return false;
  }
  return true;
}

// True if a send and a receive match, so that the receive can take the sent data.
inline bool same_message(fl_signature a, const fl_signature& b) {
  a.verb = b.verb;
  return same_call(a, b);
}

// If `sent` fits into `room`, return `room` with the number of rows of `sent`. Otherwise return `room`.
inline fl_signature fitted(const fl_signature& room, const fl_signature& sent) {
  fl_signature part = room;
  if (room.ndim <= 0 || sent.shape[0] > room.shape[0] || sent.count > room.count) return room;
  part.shape[0] = sent.shape[0];
  part.count = sent.count;
  return same_message(sent, part) ? part : room;
}

// True if the calls of all ranks agree. All are compared with a call that has a full signature, if there is
// one, because a call with FL_ANY agrees with different calls. So every rank gets the same answer.
inline bool all_same(const fl_signature* calls, int ranks) {
  const auto* full = std::find_if(calls, calls + ranks, [](const fl_signature& call) { return call.ndim != FL_ANY; });
  const fl_signature& measure = full == calls + ranks ? *calls : *full;
  return std::all_of(calls, calls + ranks, [&](const fl_signature& call) { return same_call(measure, call); });
}

// Like all_same, and also require that the root of a broadcast or scatter has a full signature.
inline bool are_one_call(const fl_signature* calls, int ranks) {
  return all_same(calls, ranks) && (!root_must_know(calls->verb) || calls[calls->root].ndim != FL_ANY);
}

// Return the call that replaces `call` because its rank raises an earlier mismatch. `compared`: number of the
// last call that the rank has compared.
inline fl_signature withdrawn(const fl_signature& call, uint32_t compared) {
  fl_signature instead{};
  instead.verb = FL_BARRIER;
  instead.ndim = FL_WITHDRAWN;
  instead.op = call.verb;
  instead.count = compared;
  instead.sequence = call.sequence;
  return instead;
}

}  // namespace fl

// Selection of the collective that implements a verb.
#pragma once

#include "operation.h"
#include "signature.h"

namespace fl {

// `call` is the first argument of the functions of `Group`; `data` and `output` are the arguments of fl_run. A
// call that only compares signatures is a barrier. If the caller needs the shapes, it gets an empty output.
template <typename Group, typename Call>
Bytes do_verb(Group& group, Call& call, const fl_signature& signature, void* data, void* output) {
  const auto sections = [&]() -> const fl_sections& { return *static_cast<const fl_sections*>(data); };
  const auto* const room = static_cast<const fl_room*>(output);
  switch (is_compared(signature) ? static_cast<int>(FL_BARRIER) : signature.verb) {
    case FL_BARRIER: group.barrier(call); break;
    case FL_ALL_REDUCE: group.all_reduce(call, data); break;
    case FL_REDUCE: group.reduce(call, data); break;
    case FL_SCAN:
    case FL_EXSCAN: group.scan(call, data); break;
    case FL_REDUCE_SCATTER: group.reduce_scatter(call, data, output); break;
    case FL_REDUCE_SCATTER_UNEVEN: group.reduce_scatter_uneven(call, sections(), output); break;
    case FL_ALL_TO_ALL: group.all_to_all(call, data, output); break;
    case FL_ALL_TO_ALL_UNEVEN: group.all_to_all_uneven(call, sections(), output); break;
    case FL_BROADCAST: return group.broadcast(call, data);
    case FL_ALL_GATHER: return group.all_gather(call, data, room);
    case FL_GATHER: return group.gather(call, data, room);
    case FL_SCATTER: return group.scatter(call, data, output);
    default: throw Failure(FL_FAILED, {}, "unknown verb");
  }
  return is_compared(signature) && shapes_are_wanted(signature.verb) ? make_bytes(0) : Bytes{};
}

}  // namespace fl

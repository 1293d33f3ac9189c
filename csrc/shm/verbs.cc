// Which function does which verb.
#include "collectives.h"

namespace fl {
namespace {

Does table[FL_VERBS];  // filled when the library is loaded, by this file and others

const fl_sections& sections(const void* data) { return *static_cast<const fl_sections*>(data); }
const fl_room* room(const void* output) { return static_cast<const fl_room*>(output); }

// Of those that return what has arrived, or nothing.
template <typename Call>
Bytes nothing(Call call) {
  call();
  return {};
}

using S = const fl_signature&;
using C = Collectives&;
const Entry entries[] = {
    {FL_BARRIER, [](C c, S s, void*, void*) { return nothing([&] { c.barrier(s); }); }},
    {FL_ALL_REDUCE, [](C c, S s, void* x, void*) { return nothing([&] { c.all_reduce(s, x); }); }},
    {FL_REDUCE, [](C c, S s, void* x, void*) { return nothing([&] { c.reduce(s, x); }); }},
    {FL_BROADCAST, [](C c, S s, void* x, void*) { return c.broadcast(s, x); }},
    {FL_REDUCE_SCATTER,
     [](C c, S s, void* x, void* out) { return nothing([&] { c.reduce_scatter(s, x, out); }); }},
    {FL_REDUCE_SCATTER_UNEVEN,
     [](C c, S s, void* x, void* out) {
       return nothing([&] { c.reduce_scatter_uneven(s, sections(x), out); });
     }},
    {FL_ALL_GATHER, [](C c, S s, void* x, void* out) { return c.all_gather(s, x, room(out)); }},
    {FL_GATHER, [](C c, S s, void* x, void* out) { return c.gather(s, x, room(out)); }},
    {FL_SCATTER, [](C c, S s, void* x, void* out) { return c.scatter(s, x, out); }},
    {FL_ALL_TO_ALL,
     [](C c, S s, void* x, void* out) { return nothing([&] { c.all_to_all(s, x, out); }); }},
    {FL_ALL_TO_ALL_UNEVEN,
     [](C c, S s, void* x, void* out) {
       return nothing([&] { c.all_to_all_uneven(s, sections(x), out); });
     }},
};

}  // namespace

Entry::Entry(fl_verb verb, Does does) { table[verb] = does; }

Bytes do_verb(Collectives& collectives, const fl_signature& mine, void* data, void* output) {
  const bool is_known = mine.verb > 0 && mine.verb < FL_VERBS && table[mine.verb] != nullptr;
  if (!is_known) throw Failure(FL_FAILED, {}, "unknown verb");
  return table[mine.verb](collectives, mine, data, output);
}

}  // namespace fl

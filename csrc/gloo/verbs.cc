// Which function does which verb.
#include <stdexcept>

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

using G = Collectives&;
using C = Call&;
const Entry entries[] = {
    {FL_BARRIER, [](G g, C c, void*, void*) { return nothing([&] { g.barrier(c); }); }},
    {FL_ALL_REDUCE, [](G g, C c, void* x, void*) { return nothing([&] { g.all_reduce(c, x); }); }},
    {FL_REDUCE, [](G g, C c, void* x, void*) { return nothing([&] { g.reduce(c, x); }); }},
    {FL_BROADCAST, [](G g, C c, void* x, void*) { return g.broadcast(c, x); }},
    {FL_REDUCE_SCATTER,
     [](G g, C c, void* x, void* out) { return nothing([&] { g.reduce_scatter(c, x, out); }); }},
    {FL_REDUCE_SCATTER_UNEVEN,
     [](G g, C c, void* x, void* out) {
       return nothing([&] { g.reduce_scatter_uneven(c, sections(x), out); });
     }},
    {FL_ALL_GATHER, [](G g, C c, void* x, void* out) { return g.all_gather(c, x, room(out)); }},
    {FL_GATHER, [](G g, C c, void* x, void* out) { return g.gather(c, x, room(out)); }},
    {FL_SCATTER, [](G g, C c, void* x, void* out) { return g.scatter(c, x, out); }},
    {FL_ALL_TO_ALL,
     [](G g, C c, void* x, void* out) { return nothing([&] { g.all_to_all(c, x, out); }); }},
    {FL_ALL_TO_ALL_UNEVEN,
     [](G g, C c, void* x, void* out) {
       return nothing([&] { g.all_to_all_uneven(c, sections(x), out); });
     }},
};

}  // namespace

Entry::Entry(fl_verb verb, Does does) { table[verb] = does; }

Bytes do_verb(Collectives& collectives, Call& call, void* data, void* output) {
  const int verb = call.mine.verb;
  const bool is_known = verb > 0 && verb < FL_VERBS && table[verb] != nullptr;
  if (!is_known) throw std::invalid_argument("unknown verb");
  return table[verb](collectives, call, data, output);
}

}  // namespace fl

// Access to private members: explicit instantiations skip access checks.
#pragma once

namespace stress {

template <typename Tag, typename Tag::Member member>
struct Reach {
  friend typename Tag::Member member_of(Tag) { return member; }
};

// object.*member_of(tag()) is the member; its type is `pointer`.
#define REACH(tag, pointer, member)  \
  struct tag {                       \
    using Member = pointer;          \
    friend Member member_of(tag);    \
  };                                 \
  template struct Reach<tag, member>

}  // namespace stress

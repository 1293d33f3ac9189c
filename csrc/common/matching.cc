#include "matching.h"

#include <algorithm>

#include "signature.h"

namespace fl {

Search::Search(Queues& queues, const fl_message& asked, int rank, int size,
               std::atomic<uint32_t>& searches)
    : tag_(asked.signature.root), queues_(queues), any_(asked.peer < 0) {
  for (int i = 1; i < size && any_; ++i) ranks_.push_back((rank + i) % size);
  if (!ranks_.empty()) {
    std::rotate(ranks_.begin(), ranks_.begin() + searches++ % ranks_.size(), ranks_.end());
  }
  if (!any_) ranks_.push_back(asked.peer);
}

bool Search::look() {
  for (int from : ranks_) {
    if (!has_come(from, offered_)) continue;
    const QueueId id{from, false, tag_};
    if (any_ && !queues_.enter(id)) continue;  // another receive takes it
    const struct Leave {  // also where reading fails
      Search& search;
      const QueueId& id;
      ~Leave() {
        if (search.any_ && search.found_ < 0) search.queues_.leave(id);
      }
    } leave{*this, id};
    if (!has_come(from, offered_)) continue;  // one that has ended meanwhile took it
    found_ = from;
    return true;
  }
  return false;
}

fl_message Search::receive(const fl_message& asked, fl_match& match) const {
  fl_message found = asked;
  match.source = found.peer = found_;
  if (found_ < 0) return found;
  if (match.partial != 0) found.signature = fitted(asked.signature, offered_);
  match.rows = found.signature.ndim > 0 ? found.signature.shape[0] : 1;
  return found;
}

std::string Search::what_is_sent() {
  std::string text;
  for (int from : ranks_) {
    for (const int32_t tag : tags_of(from)) {
      text += name_of(from) + " is sending with tag " + std::to_string(tag) + ", ";
    }
  }
  return text + "this rank receives with tag " + std::to_string(tag_);
}

}  // namespace fl

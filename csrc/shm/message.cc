#include "message.h"

namespace fl {

Mail::Mail(Segment& segment, Peers& peers, Remote& remote, int rank, int size)
    : segment(segment),
      peers(peers),
      remote(remote),
      rank(rank),
      size(size),
      outboxes_(std::make_unique<Outbox[]>(size)),
      inboxes_(std::make_unique<Inbox[]>(size)) {}

Message::Message(Mail& mail, const fl_message& mine, int from, int to)
    : mail_(mail),
      from_(from),
      to_(to),
      channel_(mail.segment.channel(from, to)),
      bytes_(static_cast<size_t>(mine.signature.count) * mine.signature.itemsize),
      mine_(mine.signature),
      here_(mine.site) {}

Seen Message::seen() const {
  Seen seen;
  seen.reset(mail_.size);
  seen.calls[mail_.rank] = mine_;
  seen.calls[peer()] = theirs_;
  seen.sites[mail_.rank] = here_;
  seen.sites[peer()] = there_;
  return seen;
}

std::string Message::peer_is(const char* doing, const std::vector<int32_t>& tags) const {
  constexpr size_t kShown = 4;
  std::string text = mail_.peers.name(peer()) + " is ";
  if (tags.empty()) return text + "not " + doing;
  text += doing + std::string(" with tag ");
  for (size_t i = 0; i < std::min(tags.size(), kShown); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tags[i]);
  }
  return text + (tags.size() > kShown ? " and more" : "");
}

}  // namespace fl

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

void Mail::read_offers(int peer) {
  Inbox& inbox = from(peer);
  const Channel& channel = segment.channel(peer, rank);
  const uint32_t posted = look(channel.posted);
  while (static_cast<int32_t>(posted - inbox.seen) > 0) {
    const uint32_t place = channel.places[++inbox.seen % segment.offers()];
    inbox.known.push_back({segment.offer(peer, rank, place).signature.root, place});
  }
}

bool Wish::declare(Channel& channel, int32_t tag) {
  const uint32_t wanting = look(channel.wanting);
  if (place_ != kWanted || ~wanting << (32 - kWanted) == 0) return false;
  place_ = static_cast<uint32_t>(__builtin_ctz(~wanting));
  channel.wanted[place_] = tag;
  publish(channel.wanting, wanting | 1u << place_);
  return true;
}

void Wish::withdraw(Channel& channel) {
  if (place_ == kWanted) return;
  publish(channel.wanting, look(channel.wanting) & ~(1u << place_));
  place_ = kWanted;
}

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

#include "message.h"

#include <algorithm>
#include <cstring>

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
  for (uint32_t seen = inbox.seen; has_offer(peer, seen);) {
    inbox.known.push_back({++seen, segment.posting(peer, rank, seen).envelope});
    inbox.seen.store(seen, std::memory_order_relaxed);
  }
}

// A line is written again only when a later offer was answered, and so was known.
bool Mail::has_offer(int peer, uint32_t seen) const {
  return look(segment.posting(peer, rank, seen + 1).number) == seen + 1;
}

// Of all that same_call() compares but the tag, by which an offer is found.
uint64_t digest_of(const fl_signature& s) {
  uint64_t scale, digest = 0x9e3779b97f4a7c15u;
  std::memcpy(&scale, &s.scale, sizeof scale);
  const auto add = [&digest](uint64_t number) {
    digest = (digest ^ number) * 0xff51afd7ed558ccdu;
    digest ^= digest >> 32;
  };
  add(static_cast<uint64_t>(s.dtype) << 32 | static_cast<uint32_t>(s.op));
  add(static_cast<uint64_t>(s.itemsize) << 32 | static_cast<uint32_t>(s.ndim));
  add(static_cast<uint64_t>(s.part_of));
  add(scale);
  add(static_cast<uint64_t>(s.count));
  for (int d = 0; d < std::min(s.ndim, 8); ++d) add(static_cast<uint64_t>(s.shape[d]));
  return digest;
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

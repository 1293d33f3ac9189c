// The sender's end of a message.
#include <algorithm>
#include <cstring>

#include "../common/signature.h"
#include "message.h"
#include "copying.h"

namespace fl {
namespace {

class Sending final : public Message {
 public:
  Sending(Mail& mail, const fl_message& mine)
      : Message(mail, mine, mail.rank, mine.peer),
        outbox_(mail.to(mine.peer)),
        data_(static_cast<const char*>(mine.data)) {}

  bool step() override {
    switch (state_) {
      case kWaitsForPlace: return post();
      case kOffered: return receive();
      case kWaitsForTurn: return begin_to_flow();
      case kFlows: return fill();
      case kIsTaken: return end();
    }
    return false;
  }

  bool is_matched() const override { return state_ > kOffered; }

  std::string what_keeps_it() override {
    const std::string here = ", this rank sends with tag " + std::to_string(mine_.root);
    if (is_matched()) return "the message stopped half way" + here;
    return peer_is("receiving", wanted()) + here;
  }

 private:
  bool post() {
    const std::lock_guard<std::mutex> lock(outbox_.mutex);
    Posting& posting = mail_.segment.posting(from_, to_, outbox_.posted + 1);
    if (!take_place()) return false;
    expect_to_write(&posting);
    Offer& offer = this->offer();
    use_ = look(offer.answers) + 1;
    // Whoever can read the peer's memory is likely to be read by it.
    const bool is_read = bytes_ > kReadBytes && mail_.remote.can_read(to_);
    const size_t most = std::min(kInlineBytes, mail_.segment.piece_bytes());
    const size_t eager = is_read || (bytes_ > kTinyMessage && outbox_.eager_taken)
                             ? 0 : std::min(bytes_, most);
    Envelope& envelope = posting.envelope;
    has_eager_ = eager > kTinyMessage;
    if (has_eager_) {
      outbox_.eager_taken = true;
      copy(mail_.segment.eager_piece(from_, to_), data_, eager);
    } else if (eager > 0) {
      std::memcpy(envelope.tiny, data_, eager);
    }
    sent_ = eager;
    offer.address = is_read ? reinterpret_cast<uintptr_t>(data_) : 0;
    const uint32_t number = ++outbox_.posted;
    mine_.sequence = sequence_of(number);
    offer.signature = mine_;
    offer.site = here_;
    envelope.tag = mine_.root;
    envelope.place = place_;
    envelope.digest = digest_of(mine_);
    envelope.eager = static_cast<uint32_t>(eager);
    publish(posting.number, number);
    wake_peer();
    state_ = kOffered;
    return true;
  }

  // The last place is for a message that the receiver waits for: others, as many as there may be,
  // cannot keep it from coming.
  bool take_place() {
    const uint32_t places = mail_.segment.offers();
    const uint64_t all = places == 64 ? ~uint64_t{0} : (uint64_t{1} << places) - 1;
    const uint64_t free = all & ~outbox_.taken;
    const bool is_last = (free & (free - 1)) == 0;
    if (free == 0 || (is_last && !is_wanted())) {
      if (!is_short_) ++outbox_.short_of_places;
      is_short_ = true;
      return false;
    }
    if (is_short_) --outbox_.short_of_places;
    place_ = static_cast<uint32_t>(__builtin_ctzll(free));
    outbox_.taken |= uint64_t{1} << place_;
    return true;
  }

  bool is_wanted() const {
    const auto tags = wanted();
    return std::find(tags.begin(), tags.end(), mine_.root) != tags.end();
  }

  std::vector<int32_t> wanted() const {
    std::vector<int32_t> tags;
    const uint32_t wanting = look(channel_.wanting);
    for (uint32_t i = 0; i < kWanted; ++i) {
      if ((wanting >> i & 1) != 0) tags.push_back(channel_.wanted[i]);
    }
    return tags;
  }

  bool receive() {
    const Offer& offer = this->offer();
    if (look(offer.answers) != use_) return false;
    const Answer answer = offer.answer;
    turn_ = offer.turn;
    way_ = offer.way;
    theirs_ = answer == kRefused ? offer.signature : mine_;
    there_ = offer.site;
    leave_place(answer != kAccepted);
    mismatched_ = answer == kRefused;
    ended_ = answer != kAccepted;
    state_ = kWaitsForTurn;
    return true;
  }

  void leave_place(bool with_eager) {
    bool is_awaited;
    {
      const std::lock_guard<std::mutex> lock(outbox_.mutex);
      outbox_.taken &= ~(uint64_t{1} << place_);
      if (with_eager && has_eager_) outbox_.eager_taken = false;
      is_awaited = outbox_.short_of_places > 0;
    }
    if (is_awaited) wake_own();
  }

  bool begin_to_flow() {
    if (look(outbox_.turn) != turn_) return false;
    state_ = kFlows;
    fill();
    return true;
  }

  bool fill() {
    uint32_t filled = look(channel_.filled);
    const uint32_t before = filled;
    while (sent_ < bytes_ && filled - look(channel_.drained) < kPieces) {
      const size_t size = piece_size(sent_);
      char* piece = mail_.segment.piece(from_, to_, filled);
      (way_ == kThroughCaches ? copy : stream_copy)(piece, data_ + sent_, size);
      sent_ += size;
      publish(channel_.filled, ++filled);
      wake_peer();
    }
    if (sent_ == bytes_) {
      last_ = filled;
      publish(outbox_.turn, turn_ + 1);
      wake_own();
      state_ = kIsTaken;
    }
    return filled != before;
  }

  bool end() {
    if (static_cast<int32_t>(look(channel_.drained) - last_) < 0) return false;
    if (has_eager_) {
      const std::lock_guard<std::mutex> lock(outbox_.mutex);
      outbox_.eager_taken = false;
    }
    ended_ = true;
    return true;
  }

  Offer& offer() const { return mail_.segment.offer(from_, to_, place_); }

  Outbox& outbox_;
  const char* const data_;
  enum { kWaitsForPlace, kOffered, kWaitsForTurn, kFlows, kIsTaken } state_ = kWaitsForPlace;
  bool is_short_ = false, has_eager_ = false;
  uint32_t place_ = 0, use_ = 0, turn_ = 0, last_ = 0;
  Way way_ = kPastCaches;
  size_t sent_ = 0;  // bytes
};

}  // namespace

std::unique_ptr<Message> make_send(Mail& mail, const fl_message& mine) {
  return std::make_unique<Sending>(mail, mine);
}

}  // namespace fl

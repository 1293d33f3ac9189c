// The receiver's end of a message.
#include <algorithm>
#include <cstring>

#include "../common/signature.h"
#include "copying.h"
#include "message.h"

namespace fl {
namespace {

class Receiving final : public Message {
 public:
  Receiving(Mail& mail, const fl_message& mine)
      : Message(mail, mine, mine.peer, mail.rank),
        inbox_(mail.from(mine.peer)),
        data_(static_cast<char*>(mine.data)) {}

  bool step() override {
    switch (state_) {
      case kWaits: return accept();
      case kWaitsForTurn: return begin_to_flow();
      case kFlows: return drain();
      case kReads: return read();
    }
    return false;
  }

  // Let the sender know what this rank waits for.
  void settle() override {
    if (state_ != kWaits) return;
    const std::lock_guard<std::mutex> lock(inbox_.mutex);
    if (wish_.declare(channel_, mine_.root)) wake_peer();
  }

  bool is_matched() const override { return state_ != kWaits; }

  std::string what_keeps_it() override {
    const std::string here = ", this rank receives with tag " + std::to_string(mine_.root);
    if (is_matched()) return "the message stopped half way" + here;
    std::vector<int32_t> tags;
    const std::lock_guard<std::mutex> lock(inbox_.mutex);
    for (const Inbox::Known& known : inbox_.known) tags.push_back(known.envelope.tag);
    return peer_is("sending", tags) + here;
  }

 private:
  bool accept() {
    const uint32_t seen = inbox_.seen.load(std::memory_order_relaxed);
    if (has_looked_ && seen == seen_ && !mail_.has_offer(from_, seen)) return false;
    has_looked_ = true;
    {
      const std::lock_guard<std::mutex> lock(inbox_.mutex);
      mail_.read_offers(from_);
      seen_ = inbox_.seen;
      if (!find()) return false;
      wish_.withdraw(channel_);
      if (taken_.envelope.digest != digest_of(mine_)) {
        theirs_ = offer_->signature;
        if (!same_message(mine_, theirs_)) return refuse();
      }
      received_ = taken_.envelope.eager;
      if (received_ < bytes_) accept_rest();
    }
    expect_to_write(&offer_->answers);
    if (received_ > kTinyMessage) {
      copy(data_, mail_.segment.eager_piece(from_, to_), received_);
    } else if (received_ > 0) {
      std::memcpy(data_, taken_.envelope.tiny, received_);
    }
    if (received_ == bytes_) take();
    return true;
  }

  // The oldest offer with this tag, which is known no more then.
  bool find() {
    const auto known =
        std::find_if(inbox_.known.begin(), inbox_.known.end(),
                     [&](const Inbox::Known& one) { return one.envelope.tag == mine_.root; });
    if (known == inbox_.known.end()) return false;
    taken_ = *known;
    inbox_.known.erase(known);
    offer_ = &mail_.segment.offer(from_, to_, taken_.envelope.place);
    mine_.sequence = sequence_of(taken_.number);
    return true;
  }

  bool refuse() {
    there_ = offer_->site;
    offer_->signature = mine_;
    offer_->site = here_;
    answer(kRefused);
    mismatched_ = ended_ = true;
    return true;
  }

  void take() {
    answer(kTaken);
    ended_ = true;
  }

  // Read what did not come with the offer, or let it flow. The inbox is locked.
  void accept_rest() {
    const bool can_read = offer_->address != 0 && mail_.remote.can_read(peer());
    Choice::Slowest mine;
    mine.add(inbox_.choice.costs(0, bytes_));
    trial_ = inbox_.choice.begin(0, bytes_, can_read ? kWays : kDirectly, mine);
    if (trial_.way == kDirectly) {
      state_ = kReads;
      return;
    }
    offer_->way = trial_.way;
    turn_ = offer_->turn = inbox_.accepted++;
    answer(kAccepted);
    state_ = kWaitsForTurn;
  }

  // From here on the sender may put something else there.
  void answer(Answer answer) {
    offer_->answer = answer;
    publish(offer_->answers, look(offer_->answers) + 1);
    wake_peer();
  }

  bool read() {
    constexpr size_t kAtOnce = 4 << 20;  // other messages of this thread want to get on as well
    const size_t size = std::min(kAtOnce, bytes_ - received_);
    const uint64_t from = offer_->address + received_;
    if (mail_.remote.read(peer(), from, data_ + received_, size) < size) {
      let_flow();
      return true;
    }
    received_ += size;
    if (received_ == bytes_) {
      end_trial();
      take();
    }
    return true;
  }

  // After all: what came with the offer is here, the rest cannot be read. Of a peer that is gone it
  // will not come that way either, as the wait for it finds.
  void let_flow() {
    const std::lock_guard<std::mutex> lock(inbox_.mutex);
    received_ = taken_.envelope.eager;
    accept_rest();
  }

  void end_trial() {
    const std::lock_guard<std::mutex> lock(inbox_.mutex);
    inbox_.choice.end(trial_);
  }

  bool begin_to_flow() {
    if (look(inbox_.turn) != turn_) return false;
    trial_.started = Clock::now();
    state_ = kFlows;
    drain();
    return true;
  }

  bool drain() {
    uint32_t drained = look(channel_.drained);
    const uint32_t before = drained;
    while (received_ < bytes_ && look(channel_.filled) != drained) {
      const size_t size = piece_size(received_);
      copy(data_ + received_, mail_.segment.piece(from_, to_, drained), size);
      received_ += size;
      publish(channel_.drained, ++drained);
      wake_peer();
    }
    if (received_ == bytes_) {
      publish(inbox_.turn, turn_ + 1);
      wake_own();
      end_trial();
      ended_ = true;
    }
    return drained != before;
  }

  Inbox& inbox_;
  char* const data_;
  enum { kWaits, kWaitsForTurn, kFlows, kReads } state_ = kWaits;
  Inbox::Known taken_{};
  Offer* offer_ = nullptr;
  Choice::Trial trial_;
  bool has_looked_ = false;
  uint32_t seen_ = 0, turn_ = 0;
  Wish wish_;
  size_t received_ = 0;  // bytes
};

}  // namespace

std::unique_ptr<Message> make_receive(Mail& mail, const fl_message& mine) {
  return std::make_unique<Receiving>(mail, mine);
}

}  // namespace fl

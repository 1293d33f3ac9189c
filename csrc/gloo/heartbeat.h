// Whether the other hosts of a group are still there.
//
// Each rank asks one rank of the next host now and then, which answers: a byte each way. And of each host one
// rank asks one of the host that is 2, 4, 8, ... hosts further: so each host is asked from near and from far,
// and one whose neighbours are gone as well is missed all the same. Where none answers for a while, the other
// ranks of that host are asked, by connections of their own: one that is stopped, or busy, does not stand for
// its host. And some other hosts are asked too: where nobody answers, this host is the one that is cut off.
//
// And a connection that ends, of a rank that has not said that it leaves, says that its process has ended.
//
// News goes at once to all that are connected, and to the ranks of this host: they pass it on, and as hosts
// know others that are 1, 2, 4, ... hosts away it is everywhere in as many steps as their number has bits.
// Each rank reports it a little later: hosts that are lost together are reported together.
#pragma once

#include <netinet/in.h>

#include <list>
#include <map>
#include <set>

#include "../common/operation.h"
#include "abi.h"
#include "line.h"
#include "proof.h"

namespace fl {

// The hosts of a group's ranks: the same on all of them.
struct Hosts {
  Hosts(std::vector<int> numbers, std::vector<std::string> names, std::vector<sockaddr_in6> addresses,
        std::string key, double seconds);
  int count() const { return static_cast<int>(names.size()); }

  const std::vector<int> numbers;             // by rank: which host it is on, from 0 without gaps
  const std::vector<std::string> names;       // by host
  const std::vector<sockaddr_in6> addresses;  // by rank: where its Heartbeat listens, with IPv4 too
  const std::string key;                      // of proofs
  const double seconds;                       // who is silent for so long is lost
  std::vector<std::vector<int>> ranks;        // by host
  size_t most = 0;                            // of one host
};

// Connections of its own: a byte behind 64 MB on a slow link would come too late. All pairs would cost what a
// few do not, and any rank of a host answers for it. All runs on one thread, and nothing blocks. Beats wake
// nobody, as they are read each 0.25 s; all else is an event.
class Heartbeat {
 public:
  // Listens at `here`, at a port of its own. Throws.
  Heartbeat(int rank, sockaddr_storage here) : rank_(rank), listener_(here) {}
  Heartbeat(const Heartbeat&) = delete;

  int port() const { return listener_.port(); }
  // How long it may take until a beat is read.
  static constexpr std::chrono::milliseconds kLongestInterval{250};
  // Before the first look.
  void begin(std::shared_ptr<const Hosts> hosts);

  // Ask, answer, and judge. The ranks whose hosts are lost (FL_HOST_LOST), or whose processes have ended
  // (FL_PEER_LOST), and why: each once.
  std::optional<Failure> look();
  // When to look again, at the latest.
  Clock::time_point due() const { return due_; }
  // Return when it is time for that, or something has come.
  void await();
  // From any thread: this rank may go from now on, and is not lost then.
  void leave();
  // From any thread, for good: do not wait any more.
  void ring() noexcept { listener_.ring(); }

  // In a forked child.
  void abandon() const noexcept;

 private:
  struct Talk {  // with one rank
    Line line;
    Clock::time_point since;
    bool is_ours;           // we ask
    int peer = -1;          // one that asks says so at first
    bool is_fresh = false;  // since a host is silent
    bool has_shown = false, is_proven = false;
    bool is_leaving = false;  // as it says
    size_t told = 0;  // bytes of the news
  };
  struct Watched {  // a host that is asked
    int distance;   // from this one; further, for 1, where nobody is there
    int host;
    Clock::time_point heard;  // when it has answered last
  };
  struct Doubt {  // about a host
    Clock::time_point since;
    bool has_answered = false;  // its kernel
  };
  struct Loss {
    char kind;
    Clock::time_point since;
  };
  using Losses = std::map<int, Loss>;  // by host; and behind all hosts by rank

  int host(int rank) const { return hosts_->numbers[rank]; }
  std::vector<int> present(int host) const;  // of its ranks, those that have not left
  std::vector<int> near() const;             // on this host, those who are told the news
  std::vector<int> witnesses() const;        // other hosts
  Watched* watched(int host);
  bool is_silent(const Watched& each, Clock::duration time) const { return looked_ - each.heard >= time; }

  void accept_guests();
  void listen();
  void listen_to(Talk& talk);
  bool meets(Talk& talk);
  bool has_beaten(Talk& talk);
  void trust(Talk& answers);

  void ask_around();
  bool choose(Watched& each);
  void ask(int peer, bool is_fresh);
  void ask_again(int peer);

  void judge();
  void learn(int host, const Loss& loss);
  void hear(const std::string& text);
  void tell();
  std::optional<Failure> report();
  std::string in_words(const Losses& lost) const;

  const int rank_;
  Listener listener_;
  std::mutex mutex_;  // of all that changes
  bool is_leaving_ = false;
  std::shared_ptr<const Hosts> hosts_;
  Prover prover_;
  int own_ = 0, place_ = 0;  // this host, and which of its ranks this is
  Clock::duration interval_{}, doubt_{}, limit_{}, settling_{};
  Clock::time_point looked_, beats_, due_;  // the last look, the next beats and look
  Clock::time_point visited_;               // when another host has asked last
  std::list<Talk> talks_;
  std::list<Watched> watched_;
  std::map<int, Doubt> doubts_;  // by host: those asked anew, while one is silent
  std::set<int> left_;           // ranks that have left the group, or whose process has ended
  Losses lost_, untold_, unreported_;
  Clock::time_point tells_, reports_ = kNever;
  std::string news_;  // all that there have been, as they travel
};

}  // namespace fl

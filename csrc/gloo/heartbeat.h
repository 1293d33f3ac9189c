// Whether the other hosts of a group are still there.
//
// Each rank asks one rank of the next host now and then, which answers: a byte each way. Where none
// answers for a while, the other ranks of that host are asked, by connections of their own: one that
// is stopped, or busy, does not stand for its host. And the other hosts are asked too: where nobody
// answers, this host is the one that is cut off. Of what is found out, all that are connected are notified,
// and all on this host.
// Everything here runs on one thread, and nothing blocks.
#pragma once

#include <chrono>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "../common/operation.h"
#include "abi.h"
#include "line.h"

namespace fl {

// The hosts of a group's ranks; by rank, but for `seconds`: who is silent for so long is lost.
struct Hosts {
  std::vector<int> numbers;  // which host it is on, from 0
  std::vector<std::string> names;
  std::vector<sockaddr_storage> addresses;      // where its Heartbeat listens
  std::vector<std::string> shown, expected;     // proofs: what it is shown, and must show
  double seconds;
};

// Connections of its own: a byte behind 64 MB on a slow link would come too late. To one rank of
// the next host, and answered by the thread that looks after waits, as all pairs would cost what
// a ring does not, and any rank of a host answers for it. Ranks look each 0.25 s, so no small
// call is woken for it. Where a host is silent, all its ranks and one of each other host are
// asked by new connections, which tells a stopped rank from its host; one that is cut off knows
// it of itself.
class Heartbeat {
 public:
  // Listens at `here`, at a port of its own. Throws.
  Heartbeat(int rank, sockaddr_storage here);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;

  int port() const { return port_; }
  // How long it may take until a rank has seen that it was notified.
  static constexpr std::chrono::milliseconds kLongestInterval{250};
  // Before the first look.
  void begin(Hosts hosts);

  // Ask, answer, and judge. The ranks that are lost, and why, once; then nothing any more.
  std::optional<Failure> look();
  // When to look again.
  Clock::time_point due() const { return due_; }

  // In a forked child.
  void abandon() const noexcept;

 private:
  struct Guest {  // who asks us
    Line line;
    Clock::time_point since;
    bool is_proven = false;
  };
  struct Asked {  // whom we ask
    int peer;
    Line line;
    Clock::time_point since;
    bool is_fresh;  // because the one that we used to ask is silent
    bool has_shown = false, is_proven = false;
  };
  using Found = std::optional<Failure>;

  int host(int rank) const { return hosts_.numbers[rank]; }
  std::vector<int> ranks_of(int host) const;
  std::vector<int> present(int host) const;  // of its ranks, those that have not left
  std::string name(int host) const;

  void accept_guests();
  Found serve_guests();
  Found serve(Guest& guest);
  Found listen_to_asked();
  Found listen_to(Asked& asked);
  Found read(Line& line, bool& has_beaten);
  Found news(const std::string& text) const;

  void choose();
  void ask(int peer, bool is_fresh);
  void ask_again(int peer);
  void suspect();
  void trust(Asked& answers);
  Failure verdict() const;
  std::string in_words(const std::vector<int>& lost, bool reaches_another, size_t hosts) const;
  void notify(const Failure& found);

  const int rank_;
  int listener_ = -1, port_ = 0;
  Descriptor listening_;
  Hosts hosts_;
  Clock::duration interval_{}, doubt_{}, limit_{};
  int target_ = -1;                // the host that is asked; -1: none
  Clock::time_point heard_;        // when it has answered last
  Clock::time_point looked_, due_;
  std::vector<bool> left_;         // by rank: it has left the group, or its process has ended
  std::vector<bool> reached_;      // by host, while there is doubt: its kernel has answered
  std::list<Guest> guests_;
  std::list<Asked> asked_;
};

}  // namespace fl

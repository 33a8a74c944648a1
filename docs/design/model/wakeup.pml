/* Hungry wake-ups: producers that insert one job each, two runners with one slot each, and one queue.
 *
 * A runner that finds nothing turns hungry: its listener takes the queue's advisory lock in shared mode. The trigger of
 * an INSERT tries the exclusive one, and notifies if it cannot have it. A notification is sent by the commit.
 * README.md says what each name stands for in the code, and which promise each assertion keeps.
 */

#define RUNNERS 2

mtype = { absent, inserted, waiting, taken };

mtype job[PRODUCERS] = absent;
bool notifies[PRODUCERS];          /* the trigger saw that somebody is hungry */
bool exclusive;                    /* a trigger has the exclusive lock, for a moment */

bool wanted[RUNNERS];              /* the dispatcher is hungry, and has said so to the listener */
bool held[RUNNERS];                /* the listener holds the shared lock */
bool woken[RUNNERS];               /* wakes != wakes_seen */
bool backlog[RUNNERS];
bool busy[RUNNERS];                /* its one slot */
bool listening[RUNNERS];
bool heard[RUNNERS];               /* a notification that has not been read */
bool killed[RUNNERS];

byte losses = LOSSES, kills = KILLS;

/* For the assertions alone: the transaction was open while somebody turned hungry. */
bool straddles[PRODUCERS];

#define somebody_is_hungry (held[0] || held[1])

proctype Producer(byte p) {
	job[p] = inserted;
	/* neoq_wake() */
	if
	:: atomic { !exclusive && !somebody_is_hungry -> exclusive = true }
		exclusive = false
	:: atomic { (exclusive || somebody_is_hungry) -> notifies[p] = true }
	fi;
	/* Any time may pass here. */
	atomic {
		job[p] = waiting;
		straddles[p] = !notifies[p] && somebody_is_hungry;
		heard[0] = heard[0] || (notifies[p] && listening[0]);
		heard[1] = heard[1] || (notifies[p] && listening[1])
	}
}

/* dispatcher.py: _worth_a_claim(), _round(), _plan() */
proctype Dispatcher(byte r) {
	byte p;
end:	do
	:: atomic { !killed[r] && !busy[r] && (woken[r] || backlog[r] || !wanted[r]) ->
#ifndef WAKES_SEEN_AFTER_THE_CLAIM
		woken[r] = false
#endif
		}
		goto claim
#ifndef WITHOUT_POLLS
	:: atomic { !killed[r] && !busy[r] && job[0] == waiting }  /* looks in vain are left out: they change nothing */
		goto claim
#endif
	:: atomic { !killed[r] && busy[r] -> busy[r] = false }  /* the run ends */
	od;
claim:	atomic {
		p = 0;
		do
		:: p < PRODUCERS && job[p] != waiting -> p++
		:: else -> break
		od;
		if
		:: killed[r]
		:: !killed[r] && p < PRODUCERS -> job[p] = taken; busy[r] = true; backlog[r] = true
		:: !killed[r] && p == PRODUCERS -> backlog[r] = false
		fi
	}
	atomic {
		wanted[r] = !backlog[r];
#ifdef WAKES_SEEN_AFTER_THE_CLAIM
		woken[r] = false;
#endif
		p = 0
	}
	goto end
}

/* listener.py: _listen(), _apply() */
proctype Listener(byte r) {
end:	do
	:: atomic { !killed[r] && listening[r] && wanted[r] && !held[r] && !exclusive -> held[r] = true }
#ifndef NO_CLAIM_AFTER_TURNING_HUNGRY
		woken[r] = true
#endif
	:: atomic { !killed[r] && listening[r] && !wanted[r] && held[r] -> held[r] = false }
	:: atomic { !killed[r] && listening[r] && heard[r] -> heard[r] = false; woken[r] = true }
	:: atomic { losses > 0 && listening[r] -> losses--; listening[r] = false; held[r] = false; heard[r] = false }
	:: atomic { !killed[r] && !listening[r] -> listening[r] = true }
		if
		:: atomic { wanted[r] && !exclusive && !killed[r] -> held[r] = true }
		:: !wanted[r] || killed[r]
		fi;
#ifndef NO_CLAIM_AFTER_CONNECTING_AGAIN
		woken[r] = true
#endif
	od
}

/* kill -9: the server drops the lock. Runner 0 lives. */
proctype Killer() {
end:	do
	:: atomic { kills > 0 -> kills--; killed[1] = true; listening[1] = false; held[1] = false; heard[1] = false }
	od
}

#ifdef WITHOUT_POLLS
/* When everybody sleeps, and nobody polls: what still waits was inserted before anybody was hungry, and committed after
 * somebody was. Those jobs alone are left to the polls. */
active proctype Auditor() {
	byte p;
end:	timeout -> atomic {
		for (p : 0 .. PRODUCERS - 1) { assert(job[p] != waiting || straddles[p]) }
	}
}
#endif

init {
	byte p;
	atomic {
		for (p : 0 .. PRODUCERS - 1) { run Producer(p) }
		run Dispatcher(0); run Listener(0); run Dispatcher(1); run Listener(1); run Killer()
	}
}

#ifdef LIVENESS
/* Every committed job is started while a runner lives. */
ltl starts { [] ((job[0] == waiting) -> <> (job[0] == taken)) }
#endif

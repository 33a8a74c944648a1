/* Claim, fence, lease and rescue: one job, two runners, and whatever may go wrong between them.
 *
 * Each step of a process is what PostgreSQL does at once. A statement that locks rows takes two or three: it reads its
 * snapshot; it locks the row, passing over a locked one, and reads the row (but no other table) anew; it commits. Between
 * any two of them everything else may happen, for as long as one likes: a runner that takes no step is a frozen one.
 * README.md says what each name stands for in the code, and which promise each assertion keeps.
 */

#define RUNNERS 2
#define WORKERS 6  /* ids that neoq_workers may give out; 0 is none */
#define TOKENS 8

mtype = { absent, waiting, running, processed, dead };           /* the job */
mtype = { idle, looked, locked, holds };                         /* a dispatcher */

/* The row of the job, and who has it locked. */
mtype job = absent;
byte job_token, job_worker, job_crashes;
bool job_locked;

/* neoq_workers: the row, the lock on the row, the silence (0: fresh, 1: over 4 s, 2: over 30 s), the liveness lock. */
bool registered[WORKERS];
bool row_locked[WORKERS];
byte silent[WORKERS];
bool liveness_lock[WORKERS];
byte last_worker, last_token;

/* The runner's memory, which dies with its process. */
byte me[RUNNERS];        /* its worker id; 0: not registered */
mtype phase[RUNNERS] = idle;
byte token[RUNNERS];     /* of the claim it holds */
byte claiming_as[RUNNERS];
#ifdef LOOK_FOR_STRAYS_ONCE
bool doubtful[RUNNERS];  /* the answer to a claim was lost */
#define in_doubt(i) doubtful[i]
#else
#define in_doubt(i) false
#endif

/* A claim that still runs in the server after its client has given it up; 0: none. */
byte orphaned_claim;

/* What goes wrong, and how often. */
byte kills = KILLS, silences = SILENCES, answers = ANSWERS, failures = FAILURES;

/* For the assertions alone. */
bool taken_away[TOKENS]; /* somebody else ended this claim */

#define alone(w) (me[0] != w && me[1] != w)   /* no process goes by that name any more */
#define condemned(i, w) (me[i] != 0 && me[i] != w && registered[w] && !row_locked[w] \
	&& (silent[w] == 2 || (silent[w] == 1 && !liveness_lock[w])))
#define is_stray(i) (me[i] != 0 && job == running && job_worker == me[i] && job_token != token[i])
#define is_orphan (job == running && !registered[job_worker])

inline register_worker(i) {
	last_worker++;
	assert(last_worker < WORKERS);
	me[i] = last_worker;
	registered[me[i]] = true;
	liveness_lock[me[i]] = true
}

inline commit_claim(worker) {
	/* Nobody owns what is claimed: no two runs ever own one job, nor one token. */
	assert(job == waiting);
	last_token++;
	assert(last_token < TOKENS);
	job = running;
	job_token = last_token;
	job_worker = worker;
	job_locked = false
}

inline now_in_doubt(i) {
#ifdef LOOK_FOR_STRAYS_ONCE
	doubtful[i] = true
#else
	skip
#endif
}

inline back_to_waiting() {
	job = waiting; job_token = 0
}

/* statements/claiming.py, statements/outcomes.py, dispatcher.py */
proctype Dispatcher(byte i) {
end:	do
	:: atomic { phase[i] == idle && !in_doubt(i) && me[i] != 0 && registered[me[i]] && job == waiting ->
		claiming_as[i] = me[i]; phase[i] = looked }

	:: atomic { phase[i] == looked ->  /* FOR UPDATE SKIP LOCKED, and the row anew */
		if
#ifdef CLAIM_WITHOUT_LOCK
		:: true -> phase[i] = locked
#else
		:: job_locked || job != waiting -> phase[i] = idle
		:: else -> job_locked = true; phase[i] = locked
#endif
		fi }

	:: atomic { phase[i] == locked ->
		commit_claim(claiming_as[i]);
		token[i] = job_token; phase[i] = holds }
	:: atomic { phase[i] == locked && answers > 0 ->  /* committed, and the answer is lost */
		answers--; commit_claim(claiming_as[i]); now_in_doubt(i); phase[i] = idle }
	:: atomic { phase[i] == locked && answers > 0 && orphaned_claim == 0 ->  /* given up, and the server goes on with it */
		answers--; orphaned_claim = claiming_as[i]; now_in_doubt(i); phase[i] = idle }

	/* put_back_strays(), again and again: it sees what is committed, and neither sees nor waits for a claim that is not. */
#ifdef LOOK_FOR_STRAYS_ONCE
	:: atomic { phase[i] == idle && doubtful[i] && me[i] != 0 -> doubtful[i] = false;
		if
		:: job == running && job_worker == me[i] -> taken_away[job_token] = true; back_to_waiting()
		:: else
		fi }
#else
	:: atomic { (phase[i] == idle || phase[i] == holds) && is_stray(i) ->
		taken_away[job_token] = true; back_to_waiting() }
#endif

	/* The run ends, some time: it has succeeded, or fails and is tried again. */
	:: atomic { phase[i] == holds ->
		if
#ifdef OUTCOME_WITHOUT_TOKEN
		:: job == running ->
#else
		:: job == running && job_token == token[i] ->
#endif
			/* The fence: no outcome of a claim that was taken away is ever accepted. */
			assert(!taken_away[token[i]]);
			if
			:: job = processed; job_token = 0
			:: failures > 0 -> failures--; back_to_waiting()
			fi
		:: else  /* refused: the run has lost its job */
		fi;
		token[i] = 0; phase[i] = idle }
	od
}

/* maintenance.py, statements/liveness.py */
proctype Lease(byte i) {
	byte victim, seen_token; bool seen_registered[WORKERS]; byte w;
end:	do
	:: atomic { me[i] == 0 -> register_worker(i) }

	:: atomic { me[i] != 0 && !row_locked[me[i]] && (silent[me[i]] != 0 || !registered[me[i]]) ->  /* beat() */
		if
		:: registered[me[i]] -> silent[me[i]] = 0
		:: else ->  /* declared dead: gives up what it runs, though a run may end before it hears of that */
			if
			:: phase[i] == holds -> phase[i] = idle; token[i] = 0
			:: true
			fi;
			liveness_lock[me[i]] = false;
			register_worker(i)
		fi }

	/* remove_dead_workers(): a row that is being renewed is passed over. */
	:: atomic { victim == 0 && condemned(i, 1) -> victim = 1; row_locked[1] = true }
	:: atomic { victim == 0 && condemned(i, 2) -> victim = 2; row_locked[2] = true }
	:: atomic { victim == 0 && condemned(i, 3) -> victim = 3; row_locked[3] = true }
	:: atomic { victim == 0 && condemned(i, 4) -> victim = 4; row_locked[4] = true }
	:: atomic { victim == 0 && condemned(i, 5) -> victim = 5; row_locked[5] = true }
	:: atomic { victim != 0 -> registered[victim] = false; row_locked[victim] = false; victim = 0 }

	/* orphans(), and later rescue() of what it saw. */
	:: atomic { me[i] != 0 && seen_token == 0 && is_orphan -> seen_token = job_token }
	:: atomic { seen_token != 0 && !seen_registered[0] ->  /* rescue() begins: its snapshot of the workers */
		w = 1;
		do
		:: w < WORKERS -> seen_registered[w] = registered[w]; w++
		:: else -> break
		od; w = 0;
		seen_registered[0] = true }
	:: atomic { seen_registered[0] ->
		if
		:: job_locked || job == waiting || job == processed || job == dead
#ifndef RESCUE_WITHOUT_LOOKING
		:: !job_locked && job == running && seen_registered[job_worker]
#ifndef RESCUE_WITHOUT_TOKEN
		:: !job_locked && job == running && !seen_registered[job_worker] && job_token != seen_token
#endif
#endif
		:: else ->
			/* Only from the dead: a registered runner's claim is its own. */
			assert(is_orphan);
			taken_away[job_token] = true; job_crashes++;
			if
			:: job_crashes >= 3 -> job = dead; job_token = 0
			:: else -> back_to_waiting()
			fi
		fi;
		seen_token = 0;
		for (w : 0 .. WORKERS - 1) { seen_registered[w] = false } w = 0 }
	od
}

/* Ends with a commit some time; nothing is there before. */
proctype Producer() {
	job = waiting
}

/* A claim whose client is gone: the server commits it, or rolls it back. */
proctype Server() {
end:	do
	:: atomic { orphaned_claim != 0 -> commit_claim(orphaned_claim); orphaned_claim = 0 }
	:: atomic { orphaned_claim != 0 -> job_locked = false; orphaned_claim = 0 }
	od
}

/* Time passes for those who do not beat: the dead, always; the living, when they are frozen or cut off. */
proctype Clock() {
end:	do
	:: atomic { silences > 0 && me[0] != 0 && registered[me[0]] && silent[me[0]] < 2 -> silences--; silent[me[0]]++ }
	:: atomic { silences > 0 && me[1] != 0 && registered[me[1]] && silent[me[1]] < 2 -> silences--; silent[me[1]]++ }
	:: atomic { registered[1] && silent[1] < 2 && alone(1) -> silent[1] = 2 }
	:: atomic { registered[2] && silent[2] < 2 && alone(2) -> silent[2] = 2 }
	:: atomic { registered[3] && silent[3] < 2 && alone(3) -> silent[3] = 2 }
	:: atomic { registered[4] && silent[4] < 2 && alone(4) -> silent[4] = 2 }
	:: atomic { registered[5] && silent[5] < 2 && alone(5) -> silent[5] = 2 }
	od
}

/* kill -9: the memory is gone, the server rolls back and drops the liveness lock. Another process starts. */
proctype Killer() {
end:	do
	:: atomic { kills > 0 && me[1] != 0 ->
		kills--;
		if
		:: phase[1] == locked -> job_locked = false
		:: phase[1] == locked && orphaned_claim == 0 -> orphaned_claim = claiming_as[1]
		:: phase[1] != locked
		fi;
		liveness_lock[me[1]] = false;
		me[1] = 0; phase[1] = idle; token[1] = 0; claiming_as[1] = 0 }
	od
}

init {
	atomic {
		run Producer(); run Server(); run Clock(); run Killer();
		run Dispatcher(0); run Lease(0); run Dispatcher(1); run Lease(1)
	}
}

#ifdef LIVENESS
/* Every committed job is started, and comes to an end, while a runner lives. */
ltl ends { [] ((job != absent) -> <> (job == processed || job == dead)) }
#endif

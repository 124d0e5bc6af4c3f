//! Constrained outputs on a node: which tokens the rows of each step may draw. On the host, greedy rows ask for the model's first choices
//! one by one. For other rows, and for all rows of a GPU, all allowed tokens are worked out while the engine computes the step. A grammar
//! is compiled before its request reaches the loop, so that neither the loop nor a step waits for it.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use engine::{AllowedTokens, Step, StepRow};
use grammar::{CompiledGrammar, GrammarError, Grammars, Places, Vocabulary};
use model_files::model::Model;
use proto::messages::{RefuseReason, Refused};
use serving_core::ids::{ChoiceIndex, TokenId};
use serving_core::request::{AttemptKey, Request};

use crate::handle::Handle;

/// So many grammars are compiled at a time on a node. Others wait, so that the engine has a core.
pub(crate) const COMPILED_AT_ONCE: usize = 1;
/// The place of a request that has ended stays at most so long, also when no step follows.
const FORGET_INTERVAL: Duration = Duration::from_secs(1);

/// The grammars of a node that serves this model. Its tokenizer is read after the node's start, or for the first grammar.
pub(crate) fn grammars_of(model: Option<PathBuf>) -> Grammars {
    let Some(path) = model else {
        return Grammars::unknown();
    };
    Grammars::new(move || {
        let unknown = |error: &dyn std::fmt::Display| GrammarError::NoVocabulary(error.to_string());
        let model = Model::open(&path).map_err(|error| unknown(&error))?;
        let tokenizer = model.tokenizer().map_err(|error| unknown(&error))?;
        let size = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        Vocabulary::new(size, tokenizer.end_tokens(), |token: TokenId| {
            Some((tokenizer.token_bytes(token)?, tokenizer.is_special(token)))
        })
    })
}

/// Works out which tokens the rows of a step may draw, on a thread of its own while the engine computes the step. The thread ends
/// soon after the engine's.
#[derive(Debug)]
pub(crate) struct AllowedThread {
    places: Arc<Mutex<Places>>,
    followed: Arc<Followed>,
    /// The number of the step that the engine computes. Nobody needs the tokens of an earlier step.
    newest_step: Arc<AtomicU64>,
    steps: SyncSender<Arc<StepTokens>>,
    /// Whether greedy rows are worked out ahead, too.
    all_ahead: bool,
}

/// The constrained rows of a step. The first thread that needs a row's tokens works them out. Another thread that needs them waits.
#[derive(Debug)]
struct StepTokens {
    number: u64,
    newest_step: Arc<AtomicU64>,
    rows: Vec<ConstrainedRow>,
    places: Arc<Mutex<Places>>,
}

/// The requests that have places. A step holds its requests, so one that nobody holds takes no place any more.
#[derive(Debug, Default)]
struct Followed(Mutex<BTreeMap<AttemptKey, Weak<Request>>>);

#[derive(Debug)]
struct ConstrainedRow {
    index: usize,
    sequence: (AttemptKey, ChoiceIndex),
    request: Arc<Request>,
    outputs: Vec<TokenId>,
    /// A row whose outputs do not fit its grammar may draw nothing, and its request fails.
    all: OnceLock<Vec<u32>>,
}

impl AllowedThread {
    /// `all_ahead`: for an engine whose step leaves the host's cores free. On the cores of the engine that work would slow the step
    /// down, and greedy rows seldom need it.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(crate) fn start(places: Places, all_ahead: bool) -> io::Result<Self> {
        // At most one step is under way.
        let (steps, submitted) = sync_channel(1);
        let (places, followed) = (Arc::new(Mutex::new(places)), Arc::<Followed>::default());
        let (own_places, own_followed) = (places.clone(), followed.clone());
        let thread = std::thread::Builder::new().name("allowed-tokens".to_owned());
        thread.spawn(move || work(&submitted, (&own_places, &own_followed), all_ahead))?;
        Ok(Self {
            places,
            followed,
            newest_step: Arc::default(),
            steps,
            all_ahead,
        })
    }

    /// `None`: the thread has ended, which only a panic does.
    pub(crate) fn restrict(&self, step: &mut Step) -> Option<()> {
        let rows: Vec<ConstrainedRow> = step.constrained().map(ConstrainedRow::new).collect();
        if rows.is_empty() {
            return Some(());
        }
        self.followed.note(&rows);
        let has_work = rows.iter().any(|row| self.all_ahead || !row.is_greedy());
        let tokens = Arc::new(StepTokens {
            number: self.newest_step.fetch_add(1, Ordering::Relaxed) + 1,
            newest_step: self.newest_step.clone(),
            rows,
            places: self.places.clone(),
        });
        if has_work && let Err(TrySendError::Disconnected(_)) = self.steps.try_send(tokens.clone()) {
            return None;
        }
        // If the thread is still busy with an earlier step, it does not get this one. Then the code that draws works out what it needs.
        step.restrict(tokens);
        Some(())
    }
}

/// What the thread of the allowed tokens does until the engine's thread has ended.
fn work(submitted: &Receiver<Arc<StepTokens>>, (places, followed): (&Mutex<Places>, &Followed), all_ahead: bool) {
    loop {
        match submitted.recv_timeout(FORGET_INTERVAL) {
            Ok(step) => step.work_out_ahead(all_ahead),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        for request in followed.take_ended() {
            // One by one, because the engine may wait for the places.
            lock(places).forget(request);
        }
    }
}

impl Followed {
    fn note(&self, rows: &[ConstrainedRow]) {
        let requests = rows.iter().map(|row| (row.sequence.0, Arc::downgrade(&row.request)));
        lock(&self.0).extend(requests);
    }

    fn take_ended(&self) -> Vec<AttemptKey> {
        let mut ended = Vec::new();
        lock(&self.0).retain(|key, request| {
            let is_held = request.strong_count() > 0;
            if !is_held {
                ended.push(*key);
            }
            is_held
        });
        ended
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ConstrainedRow {
    fn new((index, row, outputs): (usize, &StepRow, &[TokenId])) -> Self {
        // All choices of a row have the same outputs.
        let first_choice = row.draws.as_ref().map_or(0, |draws| draws.choices.start);
        Self {
            index,
            sequence: (row.key, ChoiceIndex(first_choice)),
            request: row.request.clone(),
            outputs: outputs.to_vec(),
            all: OnceLock::new(),
        }
    }

    fn is_greedy(&self) -> bool {
        self.request.sampling.temperature <= 0.0
    }
}

impl StepTokens {
    fn work_out_ahead(&self, also_greedy: bool) {
        for row in self.rows.iter().filter(|row| also_greedy || !row.is_greedy()) {
            if self.newest_step.load(Ordering::Relaxed) != self.number {
                return;
            }
            self.all_of(row);
        }
    }

    fn all_of<'a>(&'a self, row: &'a ConstrainedRow) -> &'a [u32] {
        row.all.get_or_init(|| {
            let mut places = lock(&self.places);
            let allowed = places.allowed(row.sequence, &row.request.constraint, &row.outputs);
            allowed.map(<[u32]>::to_vec).unwrap_or_else(|error| {
                tracing::warn!(request_id = %row.sequence.0.request, %error, "an output lost its grammar; its request fails");
                Vec::new()
            })
        })
    }

    fn row(&self, index: usize) -> Option<&ConstrainedRow> {
        self.rows.iter().find(|row| row.index == index)
    }
}

impl AllowedTokens for StepTokens {
    fn allows(&self, row: usize, token: TokenId) -> Option<bool> {
        let row = self.row(row)?;
        match row.all.get() {
            Some(all) => Some(engine::is_set(all, token)),
            None => {
                let asked = (&row.outputs[..], token);
                lock(&self.places).allows(row.sequence, &row.request.constraint, asked)
            }
        }
    }

    fn all(&self, row: usize) -> &[u32] {
        self.row(row).map_or(&[], |row| self.all_of(row))
    }
}

impl Handle {
    /// Compiles the request's grammar, if it has one. The request's stream has to keep the result. The coordinator has compiled the grammar,
    /// too, so a refusal here means that the two processes differ. Grammars that were compiled for another salt count as unknown: else the
    /// time to the first token would say what other tenants send.
    ///
    /// # Errors
    /// The grammar cannot be compiled here, or not now.
    pub async fn prepare(&self, request: &Request) -> Result<Option<Arc<CompiledGrammar>>, Refused> {
        let Some(grammar) = request.constraint.grammar.clone() else {
            return Ok(None);
        };
        let place = self.compiling.clone().acquire_owned().await;
        let (grammars, salt) = (self.grammars.clone(), request.prefix_salt);
        let compiling = tokio::task::spawn_blocking(move || {
            // A grammar is compiled to its end, even when its client goes away meanwhile.
            let _place = place;
            grammars.compile_for(salt, &grammar)
        });
        let compiled = compiling.await;
        Err(match compiled {
            Ok(Ok(compiled)) => return Ok(Some(compiled)),
            Ok(Err(error)) => refused(&error),
            Err(error) => Refused {
                reason: RefuseReason::Invalid,
                detail: format!("compiling its grammar broke: {error}"),
            },
        })
    }
}

fn refused(error: &GrammarError) -> Refused {
    let reason = match error {
        // It may be there in a moment, here or elsewhere.
        GrammarError::NoThread(_) => RefuseReason::NoCapacity,
        GrammarError::Invalid(_) | GrammarError::NoVocabulary(_) | GrammarError::Lost(_) => RefuseReason::Invalid,
    };
    let detail = format!("its grammar cannot be compiled: {error}");
    Refused { reason, detail }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use prometheus_client::registry::Registry;
    use serving_core::ids::{Attempt, NodeEpoch, PrefixSalt};
    use serving_core::request::OutputGrammar;
    use tokio::sync::{Semaphore, oneshot};

    use super::*;
    use crate::inbox::Inbox;
    use crate::metrics::Metrics;

    fn handle(grammars: Grammars) -> Handle {
        Handle {
            inbox: Arc::new(Inbox::default()),
            grammars: Arc::new(grammars),
            compiling: Arc::new(Semaphore::new(COMPILED_AT_ONCE)),
            metrics: Metrics::of_prefill(&mut Registry::default(), Arc::default(), None),
            epoch: NodeEpoch(1),
            block_tokens: 16,
        }
    }

    /// One whose output is letters `a`.
    fn request(salt: Option<PrefixSalt>) -> Request {
        let mut request = crate::node_loop::tests::message(1).request;
        Arc::make_mut(&mut request.constraint).grammar = Some(OutputGrammar::Regex("a+".into()));
        request.prefix_salt = salt;
        request
    }

    const END: TokenId = TokenId(256);

    /// One token for each byte, and the end.
    fn vocabulary() -> Result<Vocabulary, GrammarError> {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        Vocabulary::new(257, &[END], |token| match token {
            END => Some((b"<end>".as_slice(), true)),
            TokenId(byte) => Some((bytes.get(byte as usize..=byte as usize)?, false)),
        })
    }

    #[test]
    fn a_request_is_followed_until_nobody_holds_it() {
        let request = Arc::new(request(None));
        let key = AttemptKey {
            request: request.id,
            attempt: Attempt(0),
        };
        let row = ConstrainedRow {
            index: 0,
            sequence: (key, ChoiceIndex(0)),
            request: request.clone(),
            outputs: Vec::new(),
            all: OnceLock::new(),
        };
        let followed = Followed::default();
        followed.note(&[row]);
        assert!(followed.take_ended().is_empty());
        drop(request);
        assert_eq!(followed.take_ended(), [key]);
        assert!(followed.take_ended().is_empty());
    }

    #[test]
    fn a_grammar_that_no_thread_compiles_is_tried_again() {
        let no_thread = refused(&GrammarError::NoThread(io::ErrorKind::WouldBlock));
        assert_eq!(no_thread.reason, RefuseReason::NoCapacity);
        let wrong = refused(&GrammarError::Invalid("it has no end".to_owned()));
        assert_eq!(wrong.reason, RefuseReason::Invalid);
    }

    #[tokio::test]
    async fn a_tenant_finds_no_grammar_that_the_node_has_compiled_for_another() {
        let handle = handle(Grammars::new(vocabulary));
        let [one, other] = [1, 2].map(|salt| request(Some(PrefixSalt(salt))));
        let mut compiled = Vec::new();
        for request in [&one, &one, &other, &request(None)] {
            compiled.push(handle.prepare(request).await.unwrap().unwrap());
        }
        assert!(Arc::ptr_eq(&compiled[0], &compiled[1]));
        assert!(!Arc::ptr_eq(&compiled[0], &compiled[2]) && !Arc::ptr_eq(&compiled[0], &compiled[3]));
    }

    #[tokio::test]
    async fn a_grammar_keeps_its_place_until_it_is_compiled_though_its_client_has_gone() {
        let (is_compiling, compiling) = oneshot::channel();
        let (open_gate, gate) = mpsc::sync_channel::<()>(1);
        let at_gate = Mutex::new(Some((is_compiling, gate)));
        let load = move || {
            let (is_compiling, gate) = at_gate.lock().unwrap().take().expect("it is read once");
            is_compiling.send(()).unwrap();
            let _ = gate.recv();
            Err(GrammarError::NoVocabulary("the test has none".to_owned()))
        };
        let handle = handle(Grammars::new(load));
        let places = handle.compiling.clone();
        let request = request(None);
        let client = tokio::spawn(async move { handle.prepare(&request).await.is_ok() });
        compiling.await.unwrap();
        client.abort();
        assert!(client.await.unwrap_err().is_cancelled());
        assert_eq!(places.available_permits(), 0, "the compiler runs");
        drop(open_gate);
        let _place = places.acquire().await.unwrap();
    }
}

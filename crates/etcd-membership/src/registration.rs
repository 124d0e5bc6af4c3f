//! Keeps one entry registered for as long as it lives, whatever happens to etcd: see [`Registration`].
//!
//! The loop does not wait for news of a loss; it looks. Each turn, every third of the TTL, it renews the lease (or has a
//! new one granted), reads its own key, and writes the key if it is not as it should be. So it makes no difference whether
//! the lease ran out while etcd was paused, etcd lost its data, a person deleted the key, or this process was stopped.

use std::time::{Duration, Instant};

use serving_core::ids::NodeEpoch;
use serving_core::node::NodeState;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::address::EtcdAddress;
use crate::back_off::{BackOff, jittered};
use crate::claim::{Claim, Found, Verdict};
use crate::connection::{Connection, GuardedPut, Lease};
use crate::entry::{BadRecord, Entry, epoch_of};
use crate::first_answer::say_unanswered;
use crate::registration_health::RegistrationHealth;
use crate::trouble::EtcdTrouble;

/// Three chances to renew within one lease: two may fail.
const RENEWALS_PER_LEASE: u32 = 3;
/// A call may take at most this share of a lease, so that a retry still comes in time.
const CALLS_PER_LEASE: u32 = 3;
/// The limit for any lease: a process should learn within seconds that etcd does not answer.
const CALL_LIMIT_MAX: Duration = Duration::from_secs(5);
/// How often in one turn writes to the own key may lose against another process's write.
const WRITES_PER_TURN_MAX: usize = 3;
const LEAVE_TIME_LIMIT: Duration = Duration::from_secs(1);

/// etcd counts whole seconds. A shorter time would be renewed without a pause.
pub(crate) const LEASE_TTL_MIN: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub struct RegistrationConfig {
    /// How long the entry outlives a dead process. etcd counts whole seconds, from 2 on.
    pub lease_ttl: Duration,
}

impl RegistrationConfig {
    fn ttl(&self) -> Duration {
        self.lease_ttl.max(LEASE_TTL_MIN)
    }

    fn call_limit(&self) -> Duration {
        (self.ttl() / CALLS_PER_LEASE).min(CALL_LIMIT_MAX)
    }
}

/// An entry that a task of its own keeps registered until [`Registration::leave`]. Dropping it stops the task; the entry is
/// then removed with its lease.
#[derive(Debug)]
pub struct Registration<T> {
    entry: watch::Sender<T>,
    health: watch::Receiver<RegistrationHealth>,
    leave: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

impl<T: Entry> Registration<T> {
    /// Starts the task on the current Tokio runtime. It fails only for an entry that all readers would skip.
    pub fn start(address: EtcdAddress, config: RegistrationConfig, entry: T) -> Result<Self, BadRecord> {
        entry.encode()?;
        let key = format!("{}{}", address.prefix(T::FOLDER), entry.id().name);
        let claim = Claim::new(entry.id().epoch);
        let (entry, entry_out) = watch::channel(entry);
        let (health_in, health) = watch::channel(RegistrationHealth::Retrying {
            why: EtcdTrouble::NotYet,
            since: Instant::now(),
        });
        let (leave, leaving) = watch::channel(false);
        let keeper = Keeper {
            address,
            config,
            key,
            claim,
            entry: entry_out,
            health: health_in,
            endpoint_index: 0,
            connection: None,
            lease: None,
        };
        Ok(Self {
            entry,
            health,
            leave,
            task: Some(tokio::spawn(keeper.run(leaving))),
        })
    }

    /// Tells the others the process's state. It is written at once, or when etcd is back.
    pub fn update(&self, state: NodeState) {
        self.entry.send_if_modified(|entry| {
            let is_new = entry.state() != state;
            entry.set_state(state);
            is_new
        });
    }

    pub fn health(&self) -> watch::Receiver<RegistrationHealth> {
        self.health.clone()
    }

    /// Removes the entry. After one second it gives up, and the entry is removed with its lease.
    pub async fn leave(mut self) {
        self.leave.send_replace(true);
        if let Some(task) = self.task.as_mut() {
            let _ = tokio::time::timeout(LEAVE_TIME_LIMIT, task).await;
        }
    }
}

impl<T> Drop for Registration<T> {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

struct Keeper<T> {
    address: EtcdAddress,
    config: RegistrationConfig,
    key: String,
    claim: Claim,
    entry: watch::Receiver<T>,
    health: watch::Sender<RegistrationHealth>,
    endpoint_index: usize,
    connection: Option<Connection>,
    /// It outlives connections: an etcd that was only away still has it.
    lease: Option<Lease>,
}

/// Why the turns end.
enum Stop {
    Trouble(EtcdTrouble),
    Fenced(NodeEpoch),
}

impl From<EtcdTrouble> for Stop {
    fn from(trouble: EtcdTrouble) -> Self {
        Self::Trouble(trouble)
    }
}

impl<T: Entry> Keeper<T> {
    async fn run(mut self, mut leaving: watch::Receiver<bool>) {
        let unanswered = say_unanswered(self.address.to_string(), self.health.subscribe());
        let by_epoch = tokio::select! {
            by_epoch = self.keep() => Some(by_epoch),
            _ = leaving.wait_for(|is_leaving| *is_leaving) => None,
            never = unanswered => match never {},
        };
        if let Some(by_epoch) = by_epoch {
            tracing::error!(key = %self.key, %by_epoch, "a process started later has this name; no longer registered");
            self.health.send_replace(RegistrationHealth::Fenced { by_epoch });
        }
        // This is also right for a fenced life: its lease holds nothing any more.
        self.give_up_lease().await;
        // `leave` waits for the task's end, and a fenced process may be slow.
        let _ = leaving.wait_for(|is_leaving| *is_leaving).await;
    }

    /// Ends only when fenced.
    async fn keep(&mut self) -> NodeEpoch {
        let mut back_off = BackOff::new();
        loop {
            let why = match self.turns(&mut back_off).await {
                Stop::Fenced(by_epoch) => return by_epoch,
                Stop::Trouble(why) => why,
            };
            self.connection = None;
            self.endpoint_index = self.endpoint_index.wrapping_add(1);
            self.tell_trouble(why);
            tokio::time::sleep(back_off.pause()).await;
        }
    }

    /// Takes turns on one connection until something fails.
    async fn turns(&mut self, back_off: &mut BackOff) -> Stop {
        loop {
            match self.turn().await {
                Ok(()) => {}
                Err(stop) => return stop,
            }
            back_off.reset();
            self.tell_registered();
            let wanted = self.config.ttl();
            let ttl = self.lease.map_or(wanted, |lease| lease.ttl.min(wanted));
            tokio::select! {
                () = tokio::time::sleep(jittered(ttl / RENEWALS_PER_LEASE)) => {}
                changed = self.entry.changed() => if changed.is_err() {
                    // The registration is being dropped, which ends this task.
                    std::future::pending::<()>().await;
                },
            }
        }
    }

    async fn turn(&mut self) -> Result<(), Stop> {
        let etcd = match &self.connection {
            Some(connection) => connection.clone(),
            None => Connection::open(&self.address, self.endpoint_index, self.config.call_limit()).await?,
        };
        self.connection = Some(etcd.clone());
        let lease = self.hold_lease(&etcd).await?;
        self.hold_key(&etcd, lease).await
    }

    async fn hold_lease(&mut self, etcd: &Connection) -> Result<Lease, EtcdTrouble> {
        if let Some(lease) = self.lease {
            if etcd.keep_alive(lease.id).await? {
                return Ok(lease);
            }
            tracing::warn!(key = %self.key, "etcd has lost the lease; registering again");
            self.lease = None;
        }
        let lease = etcd.grant(self.config.ttl()).await?;
        self.lease = Some(lease);
        Ok(lease)
    }

    async fn hold_key(&mut self, etcd: &Connection, lease: Lease) -> Result<(), Stop> {
        // It can fail only for a state without a name, and all states have names. If it fails, nothing is written.
        let value = self.entry.borrow_and_update().encode();
        let value = value.map_err(|error| EtcdTrouble::BadEntry {
            detail: error.to_string(),
        })?;
        for _ in 0..WRITES_PER_TURN_MAX {
            let found = etcd.read(&self.key).await?;
            let expected = match self.claim.judge(found.as_ref().map(|record| Found {
                epoch: epoch_of(&record.value),
                mod_revision: record.mod_revision,
            })) {
                Verdict::Fenced { by_epoch } => return Err(Stop::Fenced(by_epoch)),
                Verdict::Ours { .. } if found.is_some_and(|found| found.value == value && found.lease == lease.id) => {
                    return Ok(());
                }
                Verdict::Free => None,
                Verdict::Ours { mod_revision } | Verdict::TakeOver { mod_revision } => Some(mod_revision),
            };
            let put = GuardedPut {
                key: &self.key,
                value: value.clone(),
                lease: lease.id,
                expected,
            };
            match etcd.put(put).await {
                Ok(Some(revision)) => {
                    self.claim.wrote(revision);
                    tracing::info!(key = %self.key, revision, endpoint = etcd.endpoint(), "registered");
                    return Ok(());
                }
                // Another process has written in between. Look again.
                Ok(None) => {}
                Err(trouble) => {
                    if trouble == EtcdTrouble::LeaseLost {
                        self.lease = None;
                    }
                    return Err(trouble.into());
                }
            }
        }
        Err(EtcdTrouble::Contended.into())
    }

    /// Best effort within the second for which `leave` waits.
    async fn give_up_lease(&mut self) {
        let Some(lease) = self.lease.take() else {
            return;
        };
        let revoking = async {
            let etcd = match self.connection.take() {
                Some(connection) => connection,
                None => Connection::open(&self.address, self.endpoint_index, LEAVE_TIME_LIMIT).await?,
            };
            etcd.revoke(lease.id).await
        };
        match tokio::time::timeout(LEAVE_TIME_LIMIT, revoking).await {
            Ok(Ok(())) => tracing::info!(key = %self.key, "no longer registered"),
            Ok(Err(why)) => tracing::warn!(key = %self.key, %why, "cannot revoke the lease; the entry goes with it"),
            Err(_) => tracing::warn!(key = %self.key, "etcd does not answer; the entry goes with its lease"),
        }
    }

    fn tell_registered(&self) {
        self.health.send_if_modified(|health| {
            let is_news = !matches!(health, RegistrationHealth::Registered { .. });
            if is_news {
                *health = RegistrationHealth::Registered { since: Instant::now() };
            }
            is_news
        });
    }

    /// Logs the first trouble of an outage, and any trouble that a person must mend. The rest would only repeat itself. An
    /// etcd that has not answered since the start is told by `say_unanswered`.
    fn tell_trouble(&self, why: EtcdTrouble) {
        self.health.send_if_modified(|health| {
            let (is_first, is_news, since) = match health {
                RegistrationHealth::Retrying { why: known, since } => (false, *known != why, *since),
                _ => (true, true, Instant::now()),
            };
            match (is_first, is_news && why.is_for_a_person()) {
                (_, true) => tracing::error!(key = %self.key, %why, "not registered; trying again for ever"),
                (true, _) => tracing::warn!(key = %self.key, %why, "registration not confirmed; trying again for ever"),
                _ => tracing::debug!(key = %self.key, %why, "registration not confirmed"),
            }
            if is_news {
                *health = RegistrationHealth::Retrying { why, since };
            }
            is_news
        });
    }
}

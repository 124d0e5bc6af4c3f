//! etcd's news of one folder. It lists the folder, watches from there, asks for signs of life, and starts again after any
//! doubt.

use std::time::Duration;

use etcd_client::WatchResponse;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::address::EtcdAddress;
use crate::back_off::{BackOff, jittered};
use crate::connection::{Connection, KeyRecord, kept_of_key};
use crate::tracker::{Change, Heard, MEMBERS_MAX};
use crate::trouble::{Call, EtcdTrouble};

/// The messages for the directory's loop.
pub(crate) type News = Result<Heard, EtcdTrouble>;

#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceTiming {
    pub call_limit: Duration,
    /// How often a sign of life is asked for, so that a paused server differs from a quiet one. etcd answers since version
    /// 3.4; an older one would count as silent.
    pub progress_interval: Duration,
    /// A watch that was silent for this long is dropped.
    pub silence: Duration,
    /// How often a list is read again, because etcd has lost events before.
    pub relist_interval: Duration,
}

pub(crate) struct Source {
    pub address: EtcdAddress,
    pub prefix: String,
    pub timing: SourceTiming,
    pub news: mpsc::Sender<News>,
}

/// Why a connection is no longer used.
enum Stop {
    Trouble(EtcdTrouble),
    /// The directory is gone.
    NobodyListens,
}

impl From<EtcdTrouble> for Stop {
    fn from(trouble: EtcdTrouble) -> Self {
        Self::Trouble(trouble)
    }
}

impl Source {
    /// Ends when nobody listens any more.
    pub(crate) async fn run(self) {
        let mut back_off = BackOff::new();
        let mut endpoint_index = 0_usize;
        loop {
            let Stop::Trouble(why) = self.use_connection(endpoint_index, &mut back_off).await else {
                return;
            };
            if self.news.send(Err(why)).await.is_err() {
                return;
            }
            endpoint_index = endpoint_index.wrapping_add(1);
            tokio::time::sleep(back_off.pause()).await;
        }
    }

    async fn use_connection(&self, endpoint_index: usize, back_off: &mut BackOff) -> Stop {
        let etcd = match Connection::open(&self.address, endpoint_index, self.timing.call_limit).await {
            Ok(etcd) => etcd,
            Err(trouble) => return trouble.into(),
        };
        loop {
            match self.list_and_watch(&etcd, back_off).await {
                // A planned new list, or one because of a compaction.
                Ok(()) => {}
                Err(stop) => return stop,
            }
        }
    }

    /// `Ok`: the list must be read again.
    async fn list_and_watch(&self, etcd: &Connection, back_off: &mut BackOff) -> Result<(), Stop> {
        let list = etcd.list(&self.prefix, MEMBERS_MAX).await?;
        let from_revision = list.revision.saturating_add(1);
        self.tell(Heard::Listed {
            revision: list.revision,
            records: list.records,
            is_cut: list.is_cut,
        })
        .await?;
        let mut watch = etcd.watch(&self.prefix, from_revision).await?;
        let relist_at = Instant::now() + jittered(self.timing.relist_interval);
        let mut heard_at = Instant::now();
        let mut ask_at = heard_at + self.timing.progress_interval;
        loop {
            tokio::select! {
                message = watch.message() => {
                    heard_at = Instant::now();
                    let message = message.map_err(|error| etcd.trouble(Call::Watch, &error))?;
                    let message = message.ok_or_else(|| watch_ended(etcd, "the stream ended"))?;
                    if message.canceled() {
                        return self.canceled(etcd, &message, back_off).await;
                    }
                    // An etcd that has lost its data would keep this watch waiting for a revision that is far away.
                    if message.header().is_some_and(|header| header.revision() < list.revision) {
                        return Err(watch_ended(etcd, "its revisions went backwards").into());
                    }
                    back_off.reset();
                    self.tell(heard(&message)).await?;
                }
                () = tokio::time::sleep_until(ask_at) => {
                    ask_at = Instant::now() + self.timing.progress_interval;
                    // The queue in front of a stalled connection is long enough. If it is not, silence ends the watch.
                    let asking = tokio::time::timeout(self.timing.call_limit, watch.request_progress());
                    if let Ok(asked) = asking.await {
                        asked.map_err(|error| etcd.trouble(Call::Watch, &error))?;
                    }
                }
                () = tokio::time::sleep_until(heard_at + self.timing.silence) => {
                    let silent_ms = u64::try_from(heard_at.elapsed().as_millis()).unwrap_or(u64::MAX);
                    let endpoint = etcd.endpoint().to_owned();
                    return Err(EtcdTrouble::Silent { endpoint, silent_ms }.into());
                }
                () = tokio::time::sleep_until(relist_at) => return Ok(()),
            }
        }
    }

    /// After a compaction only a new list is needed. Any other reason may come again, so it waits for the back-off.
    async fn canceled(&self, etcd: &Connection, message: &WatchResponse, back_off: &mut BackOff) -> Result<(), Stop> {
        match message.compact_revision() {
            0 => Err(watch_ended(etcd, message.cancel_reason()).into()),
            compact_revision => {
                tracing::info!(prefix = %self.prefix, compact_revision, "the watch fell behind a compaction; listing anew");
                tokio::time::sleep(back_off.pause()).await;
                Ok(())
            }
        }
    }

    async fn tell(&self, heard: Heard) -> Result<(), Stop> {
        self.news.send(Ok(heard)).await.map_err(|_| Stop::NobodyListens)
    }
}

fn watch_ended(etcd: &Connection, detail: &str) -> EtcdTrouble {
    EtcdTrouble::WatchEnded {
        endpoint: etcd.endpoint().to_owned(),
        detail: crate::entry_fields::shown(detail),
    }
}

fn heard(message: &WatchResponse) -> Heard {
    let changes = message.events().iter().filter_map(|event| event.kv()).map(|kv| {
        // The version of a deleted key is 0, that of a put at least 1. (`event_type()` would panic on a type that it does
        // not know.)
        if kv.version() == 0 {
            Change::Delete {
                key: kept_of_key(kv.key()).to_vec(),
                mod_revision: kv.mod_revision(),
            }
        } else {
            Change::Put(KeyRecord::of(kv))
        }
    });
    let changes: Vec<Change> = changes.collect();
    match changes.is_empty() {
        true => Heard::Progress,
        false => Heard::Changed(changes),
    }
}

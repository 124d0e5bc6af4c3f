//! etcd paused, killed, restarted and emptied: everybody is registered again, and nobody was told gone meanwhile (T12).

use std::time::{Duration, Instant};

use etcd_client::GetOptions;
use etcd_membership::{CoordinatorEntry, Directory, DirectoryConfig, Registration};

use crate::etcd_process::Etcd;
use crate::kit::{LIMIT, TTL, Witness, directory, is_whole, parse, register, registered, see, within};

const NAMES: [&str; 3] = ["c0", "c1", "c2"];

/// Three members, a directory that sees them, and a witness.
struct Cluster {
    members: Vec<Registration<CoordinatorEntry>>,
    directory: Directory<CoordinatorEntry>,
    witness: Witness,
}

impl Cluster {
    async fn start(etcd: &Etcd) -> Self {
        Self::start_with(etcd, directory(&etcd.address())).await
    }

    async fn start_with(etcd: &Etcd, directory: Directory<CoordinatorEntry>) -> Self {
        let members = NAMES.map(|name| register(&etcd.address(), name, 1)).into();
        see(&mut directory.view(), "all registered", |view| is_whole(view, &NAMES)).await;
        let witness = Witness::watch(&directory);
        Self {
            members,
            directory,
            witness,
        }
    }

    /// Everybody is registered in etcd itself, and the directory says so; then, for one lease, in which what etcd still
    /// remembers of the fault would run out, nobody goes.
    async fn is_whole_again(&self, etcd: &Etcd, since: Instant) {
        let client = etcd.client().await;
        within(LIMIT, "all keys are back", || {
            let options = GetOptions::new().with_prefix().with_count_only();
            let mut kv = client.kv_client();
            async move {
                let answer = kv.get("/baton/test/coordinators/", Some(options)).await;
                answer.ok().filter(|answer| answer.count() == 3)
            }
        })
        .await;
        see(&mut self.directory.view(), "whole again", |view| is_whole(view, &NAMES)).await;
        eprintln!("whole again {} ms after the fault's end", since.elapsed().as_millis());
        for member in &self.members {
            registered(member).await;
        }
        let mut views = self.directory.view();
        let going = tokio::time::timeout(TTL, views.wait_for(|view| view.members.len() < 3)).await;
        assert!(going.is_err(), "told gone after the fault: {going:?}");
        see(&mut self.directory.view(), "still whole", |view| is_whole(view, &NAMES)).await;
    }
}

#[tokio::test]
async fn a_paused_etcd_costs_leases_but_nobody_is_told_gone() {
    let etcd = Etcd::start().await;
    let cluster = Cluster::start(&etcd).await;
    etcd.pause();
    // The fault's own duration: three leases.
    tokio::time::sleep(Duration::from_secs(6)).await;
    etcd.resume();
    cluster.is_whole_again(&etcd, Instant::now()).await;
    let seen = cluster.witness.seen();
    assert_eq!(seen.members_min, 3, "{seen:?}");
    eprintln!("{} of 3 leases were lost", seen.vanished_max);
    assert!(
        seen.was_stale && !seen.troubles.is_empty(),
        "the silence was noticed: {seen:?}"
    );
}

#[tokio::test]
async fn a_killed_etcd_comes_back_with_its_data() {
    let mut etcd = Etcd::start().await;
    let cluster = Cluster::start(&etcd).await;
    etcd.kill();
    see(&mut cluster.directory.view(), "the loss is noticed", |view| {
        view.trouble.is_some()
    })
    .await;
    etcd.restart().await;
    cluster.is_whole_again(&etcd, Instant::now()).await;
    let seen = cluster.witness.seen();
    assert_eq!(seen.members_min, 3, "{seen:?}");
}

#[tokio::test]
async fn an_etcd_that_comes_back_empty_empties_no_view() {
    let mut etcd = Etcd::start().await;
    let cluster = Cluster::start(&etcd).await;
    etcd.kill();
    see(&mut cluster.directory.view(), "the loss is noticed", |view| {
        view.trouble.is_some()
    })
    .await;
    etcd.restart_empty().await;
    cluster.is_whole_again(&etcd, Instant::now()).await;
    let seen = cluster.witness.seen();
    assert_eq!(seen.members_min, 3, "{seen:?}");
}

#[tokio::test]
async fn an_etcd_that_comes_back_empty_does_not_cost_a_lone_member() {
    let mut etcd = Etcd::start().await;
    let directory = directory(&etcd.address());
    let lone = register(&etcd.address(), "c0", 1);
    let mut views = directory.view();
    see(&mut views, "registered", |view| is_whole(view, &["c0"])).await;
    let witness = Witness::watch(&directory);
    etcd.kill();
    // Its registration is slower than the directory: the list that the directory gets is empty.
    drop(lone);
    etcd.restart_empty().await;
    see(&mut views, "the loss is told apart from a death", |view| {
        view.vanished.contains_key("c0")
    })
    .await;
    let lone = register(&etcd.address(), "c0", 1);
    registered(&lone).await;
    see(&mut views, "whole again", |view| is_whole(view, &["c0"])).await;
    assert_eq!(witness.seen().members_min, 1);
}

#[tokio::test]
async fn whoever_died_while_etcd_was_away_goes_after_the_grace() {
    let mut etcd = Etcd::start().await;
    let mut cluster = Cluster::start(&etcd).await;
    etcd.kill();
    // No goodbye: as if its process had been killed.
    drop(cluster.members.pop());
    etcd.restart_empty().await;
    let mut views = cluster.directory.view();
    see(&mut views, "the dead one is doubted", |view| {
        view.vanished.keys().eq(["c2"])
    })
    .await;
    let seen = see(&mut views, "the dead one is gone", |view| is_whole(view, &NAMES[..2])).await;
    assert_eq!(seen.members.len(), 2);
}

#[tokio::test]
async fn leases_lost_by_force_are_granted_again() {
    let etcd = Etcd::start().await;
    let cluster = Cluster::start(&etcd).await;
    let mut client = etcd.client().await;
    let leases = client.leases().await.expect("leases");
    assert_eq!(leases.leases().len(), 3);
    for lease in leases.leases() {
        client.lease_client().revoke(lease.id()).await.expect("revoked");
    }
    see(&mut cluster.directory.view(), "the mass loss is seen", |view| {
        !view.vanished.is_empty()
    })
    .await;
    cluster.is_whole_again(&etcd, Instant::now()).await;
}

#[tokio::test]
async fn a_process_that_died_is_gone_with_its_lease() {
    let etcd = Etcd::start().await;
    // With a lease of seconds a machine that stalls for one would be taken for an etcd that does.
    let patient = Directory::start(parse(&etcd.address()), DirectoryConfig::for_lease(TTL * 10));
    let mut cluster = Cluster::start_with(&etcd, patient).await;
    drop(cluster.members.pop());
    let view = see(&mut cluster.directory.view(), "it is gone", |view| {
        view.members.len() == 2
    })
    .await;
    assert!(view.vanished.is_empty(), "{view:?}");
    assert_eq!(cluster.witness.seen().vanished_max, 0);
}

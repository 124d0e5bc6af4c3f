//! One name, one owner: whoever comes later has it, and the other one hears of it.

use etcd_client::GetOptions;
use etcd_membership::{RegistrationHealth, View};
use serving_core::ids::NodeEpoch;

use crate::etcd_process::Etcd;
use crate::gate::{Gate, Mode};
use crate::kit::{coordinator, directory, is_whole, register, registered, see};

fn epoch_of(view: &View<etcd_membership::CoordinatorEntry>, name: &str) -> Option<NodeEpoch> {
    view.members.get(name).map(|entry| entry.id.epoch)
}

#[tokio::test]
async fn a_later_life_takes_the_name_over_and_the_earlier_one_is_fenced() {
    let etcd = Etcd::start().await;
    let directory = directory(&etcd.address());
    let mut views = directory.view();
    // Epochs are random: the later one may have the lower number.
    for (name, first, second) in [("up", 1, 9), ("down", 9, 1)] {
        let older = register(&etcd.address(), name, first);
        registered(&older).await;
        let newer = register(&etcd.address(), name, second);
        registered(&newer).await;
        let by_epoch = NodeEpoch(second);
        see(&mut older.health(), "fenced", |health| {
            *health == RegistrationHealth::Fenced { by_epoch }
        })
        .await;
        see(&mut views, "the newer one is shown", |view| {
            epoch_of(view, name) == Some(by_epoch)
        })
        .await;
        // The earlier one's farewell is not the later one's.
        older.leave().await;
        let mut client = etcd.client().await;
        let found = client
            .get(format!("/baton/test/coordinators/{name}"), None)
            .await
            .expect("read");
        assert_eq!(found.kvs().len(), 1);
        assert_eq!(epoch_of(&views.borrow(), name), Some(by_epoch));
        registered(&newer).await;
        newer.leave().await;
        see(&mut views, "both are gone", |view| !view.members.contains_key(name)).await;
    }
}

#[tokio::test]
async fn a_life_that_was_cut_off_finds_its_successor_and_is_fenced() {
    let etcd = Etcd::start().await;
    let gate = Gate::start(etcd.port, Mode::Open).await;
    let directory = directory(&etcd.address());
    let mut views = directory.view();
    let older = register(&gate.address(), "c0", 9);
    see(&mut views, "registered", |view| is_whole(view, &["c0"])).await;
    gate.set(Mode::Frozen);
    let is_retrying = |health: &RegistrationHealth| matches!(health, RegistrationHealth::Retrying { .. });
    see(&mut older.health(), "cut off", is_retrying).await;
    see(&mut views, "its lease has run out", |view| view.members.is_empty()).await;
    let newer = register(&etcd.address(), "c0", 1);
    registered(&newer).await;
    gate.set(Mode::Open);
    let by_epoch = NodeEpoch(1);
    see(&mut older.health(), "fenced", |health| {
        *health == RegistrationHealth::Fenced { by_epoch }
    })
    .await;
    assert_eq!(epoch_of(&views.borrow(), "c0"), Some(by_epoch));
}

#[tokio::test]
async fn what_a_life_left_behind_is_its_successors() {
    let etcd = Etcd::start().await;
    let mut client = etcd.client().await;
    // A crashed predecessor's record, without a lease so that it stays, and one that nobody can read.
    let left = etcd_membership::Entry::encode(&coordinator("c0", 9)).expect("encodes");
    client
        .put("/baton/test/coordinators/c0", left, None)
        .await
        .expect("put");
    client
        .put("/baton/test/coordinators/c1", "not a record", None)
        .await
        .expect("put");
    let directory = directory(&etcd.address());
    let (c0, c1) = (register(&etcd.address(), "c0", 1), register(&etcd.address(), "c1", 1));
    registered(&c0).await;
    registered(&c1).await;
    let mut views = directory.view();
    see(&mut views, "both are the successors", |view| {
        is_whole(view, &["c0", "c1"]) && view.members.values().all(|entry| entry.id.epoch == NodeEpoch(1))
    })
    .await;
    c0.leave().await;
    c1.leave().await;
    let options = GetOptions::new().with_prefix();
    let left = client.get("/baton/", Some(options)).await.expect("read");
    assert!(
        left.kvs().is_empty(),
        "they did not stand under the new leases: {:?}",
        left.kvs()
    );
}

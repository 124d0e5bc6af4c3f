//! What is written and read: registering, changing state, leaving; bad records; compaction; a dead endpoint.

use std::time::Duration;

use etcd_client::CompactionOptions;
use etcd_membership::{Directory, DirectoryConfig, NodeEntry, Registration, RegistrationConfig};
use serving_core::node::NodeState;

use crate::etcd_process::Etcd;
use crate::gate::{Gate, Mode};
use crate::kit::{TTL, coordinator, directory, is_whole, names, node, parse, register, registered, see};

#[tokio::test]
async fn nodes_and_coordinators_register_change_and_leave() {
    let etcd = Etcd::start().await;
    let coordinators = directory(&etcd.address());
    let nodes: Directory<NodeEntry> = Directory::start(parse(&etcd.address()), DirectoryConfig::for_lease(TTL));
    let coordinator = register(&etcd.address(), "coordinator-0", 1);
    let config = RegistrationConfig { lease_ttl: TTL };
    let node_entry = node("decode-0", u64::MAX);
    let registration = Registration::start(parse(&etcd.address()), config, node_entry.clone()).expect("a good entry");
    let mut views = nodes.view();
    let view = see(&mut views, "the node is registered", |view| {
        is_whole(view, &["decode-0"])
    })
    .await;
    assert_eq!(view.members["decode-0"], node_entry);
    for state in [NodeState::Ready, NodeState::Draining] {
        registration.update(state);
        see(&mut views, "its new state", |view| {
            view.members["decode-0"].record().state == state
        })
        .await;
    }
    see(&mut coordinators.view(), "the coordinator", |view| {
        is_whole(view, &["coordinator-0"])
    })
    .await;

    registration.leave().await;
    coordinator.leave().await;
    let mut client = etcd.client().await;
    let options = etcd_client::GetOptions::new().with_prefix();
    let left = client.get("/baton/", Some(options)).await.expect("read");
    assert!(left.kvs().is_empty(), "left behind: {:?}", left.kvs());
    see(&mut views, "the node is gone", |view| {
        view.members.is_empty() && view.vanished.is_empty()
    })
    .await;
}

#[tokio::test]
async fn bad_records_are_skipped_and_counted() {
    const FOLDER: &str = "/baton/test/coordinators/";
    let etcd = Etcd::start().await;
    let mut client = etcd.client().await;
    let wrong_name = etcd_membership::Entry::encode(&coordinator("other", 1)).expect("encodes");
    let newer = br#"{"schema":2,"name":"newer"}"#.to_vec();
    let deep = vec![b'['; 60_000];
    // Four of these do not fit into one message of tonic's default size.
    let huge = vec![b' '; 1_400_000];
    let bad = [
        ("json", b"{".to_vec()),
        ("empty", Vec::new()),
        ("wrong", wrong_name),
        ("newer", newer),
        ("deep", deep),
        ("huge-0", huge.clone()),
        ("huge-1", huge.clone()),
        ("huge-2", huge.clone()),
        ("huge-3", huge),
    ];
    for (name, value) in &bad {
        client
            .put(format!("{FOLDER}{name}"), value.clone(), None)
            .await
            .expect("put");
    }
    let nested = etcd_membership::Entry::encode(&coordinator("b", 1)).expect("encodes");
    client.put(format!("{FOLDER}a/b"), nested, None).await.expect("put");
    let not_text = [FOLDER.as_bytes(), &[0xff, b'\n']].concat();
    client.put(not_text, "{}", None).await.expect("put");
    let all = bad.len() as u64 + 2;

    let good = register(&etcd.address(), "good", 1);
    let directory = directory(&etcd.address());
    let mut views = directory.view();
    see(&mut views, "the good one, past the bad ones", |view| {
        is_whole(view, &["good"]) && view.skipped == all
    })
    .await;
    // While it is watched, and once more: another revision.
    client.put(format!("{FOLDER}json"), "{", None).await.expect("put");
    see(&mut views, "the new revision is counted", |view| {
        view.skipped == all + 1
    })
    .await;
    let repaired = etcd_membership::Entry::encode(&coordinator("json", 1)).expect("encodes");
    client.put(format!("{FOLDER}json"), repaired, None).await.expect("put");
    let view = see(&mut views, "the repaired one", |view| names(view) == ["good", "json"]).await;
    assert_eq!(view.skipped, all + 1);
    registered(&good).await;
}

#[tokio::test]
async fn a_watch_behind_a_compaction_is_made_good_by_a_list() {
    const KEY: &str = "/baton/test/coordinators/by-hand";
    let etcd = Etcd::start().await;
    let mut client = etcd.client().await;
    let entry = |epoch| etcd_membership::Entry::encode(&coordinator("by-hand", epoch)).expect("encodes");
    client.put(KEY, entry(1), None).await.expect("put");
    // The answer to the list is longer than this, the greetings before it are not: the watch itself is held.
    let gate = Gate::start(etcd.port, Mode::HoldRequestsAfter(200)).await;
    let directory = Directory::start(
        parse(&gate.address()),
        DirectoryConfig::for_lease(Duration::from_secs(30)),
    );
    let mut views = directory.view();
    see(&mut views, "the list", |view| is_whole(view, &["by-hand"])).await;
    see(&mut gate.held(), "the watch is held", |held| *held > 0).await;
    let mut revision = 0;
    for epoch in 2..5 {
        let put = client.put(KEY, entry(epoch), None).await.expect("put");
        revision = put.header().expect("header").revision();
    }
    let options = CompactionOptions::new().with_physical();
    client.compact(revision, Some(options)).await.expect("compacted");
    gate.set(Mode::Open);
    let is_newest = |view: &etcd_membership::View<etcd_membership::CoordinatorEntry>| {
        view.members["by-hand"].id.epoch == serving_core::ids::NodeEpoch(4)
    };
    see(&mut views, "what was compacted over", is_newest).await;
    assert_eq!(gate.connections(), 1, "a compaction is no reason to connect again");
    assert!(views.borrow().trouble.is_none());
    client.delete(KEY, None).await.expect("deleted");
    see(&mut views, "and the new watch works", |view| view.members.is_empty()).await;
}

#[tokio::test]
async fn a_cut_off_directory_keeps_its_view_and_catches_up() {
    let etcd = Etcd::start().await;
    let gate = Gate::start(etcd.port, Mode::Open).await;
    let directory = directory(&gate.address());
    let mut views = directory.view();
    let (c0, c1) = (register(&etcd.address(), "c0", 1), register(&etcd.address(), "c1", 1));
    see(&mut views, "both", |view| is_whole(view, &["c0", "c1"])).await;
    gate.set(Mode::Frozen);
    see(&mut views, "the silence is noticed", |view| {
        view.is_stale && view.trouble.is_some()
    })
    .await;
    assert_eq!(names(&views.borrow()), ["c0", "c1"]);
    c0.leave().await;
    let c2 = register(&etcd.address(), "c2", 1);
    registered(&c2).await;
    let mut client = etcd.client().await;
    let revision = client
        .get("any", None)
        .await
        .expect("read")
        .header()
        .expect("header")
        .revision();
    client.compact(revision, None).await.expect("compacted");
    gate.set(Mode::Open);
    let view = see(&mut views, "the new one", |view| {
        !view.is_stale && view.members.contains_key("c2")
    })
    .await;
    // It may have lost its lease to the silence, for all the directory knows.
    assert!(view.vanished.contains_key("c0"), "{view:?}");
    see(&mut views, "the one that left is gone after the grace", |view| {
        is_whole(view, &["c1", "c2"])
    })
    .await;
    registered(&c1).await;
}

#[tokio::test]
async fn a_dead_endpoint_is_passed_by() {
    let etcd = Etcd::start().await;
    let dead = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!(
        "etcd://127.0.0.1:{},127.0.0.1:{}/test",
        dead.local_addr().expect("port").port(),
        etcd.port
    );
    // Bound and never accepting for etcd's protocol: as good as a paused member.
    let registration = register(&address, "c0", 1);
    let directory = directory(&address);
    registered(&registration).await;
    see(&mut directory.view(), "registered", |view| is_whole(view, &["c0"])).await;
}

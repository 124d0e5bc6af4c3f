//! Which flags the options give to which process, and what is refused.

use super::*;

fn options(topology: &str) -> LocalClusterOptions {
    let topology = topology.parse().expect("a topology");
    LocalClusterOptions::new("/bin/baton".into(), topology, "/m.gguf".into())
}

#[test]
fn every_node_gets_its_name_its_coordinator_and_only_the_settings_that_were_given() {
    let mut options = options("2p1d");
    options.settings.threads_per_node = Some(2);
    options.decode_flags.push("--hold-ms-max=5".into());
    options
        .flags_by_name
        .insert("prefill-1".to_owned(), vec!["--advertise=h:1".into()]);
    let nodes = options.nodes("127.0.0.1:7400");
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["prefill-0", "prefill-1", "decode-0"]);
    let decode = &nodes[2].arguments;
    assert_eq!(decode[0], "serve-decode");
    for flag in [
        "--exit-with-stdin",
        "--coordinators=127.0.0.1:7400",
        "--threads=2",
        "--hold-ms-max=5",
        "--name=decode-0",
    ] {
        assert!(decode.contains(&flag.into()), "{flag} in {decode:?}");
    }
    assert!(!nodes[0].arguments.contains(&"--hold-ms-max=5".into()));
    let is_advertised = nodes
        .iter()
        .map(|node| node.arguments.contains(&"--advertise=h:1".into()));
    assert_eq!(is_advertised.collect::<Vec<_>>(), [false, true, false]);
    assert!(
        !decode
            .iter()
            .any(|flag| flag.to_string_lossy().starts_with("--max-num-seqs"))
    );
}

#[test]
fn each_start_has_a_secret_that_nodes_get_in_the_environment_and_nobody_sees() {
    let (ours, others) = (options("1p1d"), options("1p1d"));
    assert_ne!(ours.direct_secret, others.direct_secret);
    let name = "BATON_SHM_DIRECT_SECRET";
    let of = |options: &LocalClusterOptions, kind| {
        let mut variables = options.variables(kind).into_iter();
        let found = variables.find(|(variable, _)| *variable == name);
        found.map(|(_, value)| value.into_string().expect("it is text"))
    };
    let secret = of(&ours, ProcessKind::Prefill).expect("drawn");
    assert_eq!(secret.len(), 64);
    assert_eq!(of(&ours, ProcessKind::Decode), Some(secret.clone()));
    assert_eq!(of(&ours, ProcessKind::Coordinator), None);
    let mut decided = options("1p1d");
    decided.environment.push((name.to_owned(), String::new()));
    assert_eq!(of(&decided, ProcessKind::Decode), None, "whoever sets it decides");
    let shown = format!("{ours:?} {:?}", ours.nodes("127.0.0.1:7400"));
    assert!(!shown.contains(&secret), "{shown}");
}

#[test]
fn the_nodes_of_a_start_have_one_memory_for_their_weights_unless_somebody_sets_it() {
    let (ours, others) = (options("1p1d"), options("1p1d"));
    let of = |options: &LocalClusterOptions, kind| {
        let variables = options.variables(kind).into_iter();
        let mut paths = variables.filter(|(name, _)| *name == SHARED_WEIGHTS);
        paths.next().map(|(_, path)| path)
    };
    let path = of(&ours, ProcessKind::Prefill).expect("this system has memory files");
    assert!(std::fs::File::open(&path).is_ok());
    assert_eq!(of(&ours, ProcessKind::CoLocated), Some(path.clone()));
    assert_ne!(of(&others, ProcessKind::Decode), Some(path));
    assert_eq!(of(&ours, ProcessKind::Coordinator), None);
    let mut off = ours;
    off.environment.push((SHARED_WEIGHTS.to_owned(), String::new()));
    assert_eq!(of(&off, ProcessKind::Decode), None);
    assert!(!off.shares_weights());
}

#[test]
fn with_etcd_everybody_is_told_where_it_is_and_several_coordinators_have_numbers() {
    let mut options = options("1p1d");
    options.membership = LocalMembership::Etcd("etcd://h:1/c".to_owned());
    options.coordinator_count = 2;
    let coordinators = options.coordinators();
    let names: Vec<&str> = coordinators.iter().map(|spec| spec.name.as_str()).collect();
    assert_eq!(names, ["coordinator-0", "coordinator-1"]);
    assert!(
        coordinators
            .iter()
            .all(|spec| spec.arguments.contains(&"--membership=etcd://h:1/c".into()))
    );
    let nodes = options.nodes("a:1,b:2");
    assert!(
        nodes
            .iter()
            .all(|node| node.arguments.contains(&"--coordinators=etcd://h:1/c".into()))
    );
}

#[test]
fn every_process_is_told_all_names_of_the_model_or_finds_its_name_itself() {
    let mut options = options("1p1d");
    let names = |options: &LocalClusterOptions| -> Vec<Option<OsString>> {
        let specs = options.coordinators().into_iter().chain(options.nodes("h:1"));
        let is_name = |flag: &&OsString| flag.to_string_lossy().starts_with("--served-model-name");
        specs.map(|spec| spec.arguments.iter().find(is_name).cloned()).collect()
    };
    assert_eq!(names(&options), [None, None, None]);
    options.settings.served_model_name = vec!["a".to_owned(), "org/b".to_owned()];
    let told = Some(OsString::from("--served-model-name=a,org/b"));
    assert_eq!(names(&options), [told.clone(), told.clone(), told]);
}

#[test]
fn every_process_is_told_to_use_the_names_of_vllm() {
    let told = |options: &LocalClusterOptions| {
        let mut specs = options.nodes("127.0.0.1:7400");
        specs.extend(options.coordinators());
        let told = specs
            .iter()
            .filter(|spec| spec.arguments.contains(&"--vllm-metrics".into()));
        told.count()
    };
    let mut options = options("1p1d");
    assert_eq!(told(&options), 0);
    options.settings.vllm_metrics = true;
    assert_eq!(told(&options), 3);
}

#[test]
fn coordinators_alone_are_told_where_traces_are_viewed() {
    let mut options = options("1p1d");
    let url = "https://jaeger.example/trace/{trace_id}";
    options.settings.trace_viewer_url = Some(url.parse().expect("an address"));
    let flag = OsString::from(format!("--trace-viewer-url={url}"));
    assert!(options.coordinators()[0].arguments.contains(&flag));
    let mut nodes = options.nodes("h:1").into_iter();
    assert!(nodes.all(|node| !node.arguments.contains(&flag)));
}

#[test]
fn only_coordinators_are_told_how_to_judge_and_what_to_trace() {
    let mut options = options("1p1d");
    options.settings.slo_config = Some("/etc/slo.toml".into());
    options.settings.trace_content = true;
    for flag in ["--slo-config=/etc/slo.toml", "--trace-content"] {
        let has = |spec: &ProcessSpec| spec.arguments.contains(&flag.into());
        assert!(options.coordinators().iter().all(has), "{flag}");
        assert!(!options.nodes("h:1").iter().any(has), "{flag}");
    }
}

#[test]
fn a_coordinator_listens_again_where_it_did_and_a_node_anywhere() {
    let options = options("1p1d");
    let mut coordinator = options.coordinators().remove(0);
    let listening = Listening::coordinator("coordinator", "127.0.0.1:81", "127.0.0.1:82");
    coordinator.listen_again(&listening);
    for flag in ["--listen=127.0.0.1:81", "--control-listen=127.0.0.1:82"] {
        assert!(coordinator.arguments.contains(&flag.into()), "{coordinator:?}");
    }
    let node = options.nodes("127.0.0.1:82").remove(0);
    let mut again = node.clone();
    again.listen_again(&listening);
    assert_eq!(again, node);
}

#[test]
fn co_located_nodes_are_decode_nodes_that_prefill_too() {
    let nodes = options("2c").nodes("127.0.0.1:7400");
    assert_eq!(nodes.len(), 2);
    assert!(nodes.iter().all(|node| node.arguments[0] == "serve-decode"));
    assert!(nodes.iter().all(|node| node.arguments.contains(&"--co-located".into())));
}

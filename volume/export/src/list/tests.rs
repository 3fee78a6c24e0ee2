use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;

type Change = ExportChange<String>;
type Content = ListContent<String>;

/// Both files, as a disk has them, and their state.
#[derive(Default)]
struct Files {
    list: Vec<u8>,
    journal: Vec<u8>,
    state: ListState,
}

impl Files {
    fn open(&self) -> Replayed<String> {
        replay(&self.list, &self.journal).expect("valid files")
    }

    fn append(&mut self, changes: &[Change]) {
        let text = self.state.encode_changes(changes).expect("a journal");
        self.journal.truncate(self.state.journal_len().expect("a journal") as usize);
        self.journal.extend_from_slice(&text);
        self.state.appended(text.len());
    }

    /// Replaces the list.  The journal remains, as after a crash before it was removed.
    fn replace(&mut self, content: Content) {
        let list = self.state.encode_list(content, 0).expect("a list");
        self.state.replaced(&list);
        self.list = list.text;
    }
}

fn replay(list: &[u8], journal: &[u8]) -> Result<Replayed<String>, ListError> {
    StoredList::decode(list)?.replay(journal, |name| {
        let pool = name.pool.strip_prefix("rados:").unwrap_or(&name.pool).to_owned();
        (!name.image.is_empty()).then_some(ExportName { pool, ..name })
    })
}

fn entry(image: &str, unit: u32) -> Value {
    json!({ "pool": "local", "image": image, "front": "iscsi", "unit": unit })
}

fn name(image: &str) -> ExportName<String> {
    ExportName { front: "iscsi".into(), pool: "local".into(), image: image.into() }
}

fn retired(image: &str, unit: u32) -> RetiredNumber<String> {
    RetiredNumber { front: "iscsi".into(), within: String::new(), unit, image: image.into() }
}

fn attached(image: &str, unit: u32) -> Change {
    ExportChange { name: name(image), entries: vec![entry(image, unit)], retired: None }
}

fn detached(image: &str, unit: u32) -> Change {
    ExportChange { name: name(image), entries: Vec::new(), retired: Some(retired(image, unit)) }
}

#[test]
fn the_files_are_pinned() {
    let mut files = Files::default();
    files.replace(ListContent { targets: vec![json!({ "no": "export" })], retired: vec![retired("x", 7)] });
    let list = r#"{
  "version": 2,
  "generation": 1,
  "targets": [
    {
      "no": "export"
    }
  ],
  "retired": [
    {
      "front": "iscsi",
      "unit": 7,
      "image": "x"
    }
  ]
}"#;
    assert_eq!(String::from_utf8_lossy(&files.list), list);
    files.append(&[attached("b", 7), detached("a", 1)]);
    files.append(&[]);
    let journal = concat!(
        "{\"generation\":1}\n",
        "[{\"front\":\"iscsi\",\"pool\":\"local\",\"image\":\"b\",",
        "\"entries\":[{\"front\":\"iscsi\",\"image\":\"b\",\"pool\":\"local\",\"unit\":7}]},",
        "{\"front\":\"iscsi\",\"pool\":\"local\",\"image\":\"a\",",
        "\"retired\":{\"front\":\"iscsi\",\"unit\":1,\"image\":\"a\"}}]\n",
        "[]\n",
    );
    let sorted = |text: &str| -> Vec<Value> {
        text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
    };
    // The order of an entry's fields is its writer's.
    assert_eq!(sorted(&String::from_utf8_lossy(&files.journal)), sorted(journal));
    let Replayed { state, content, torn } = replay(list.as_bytes(), journal.as_bytes()).expect("valid files");
    assert!(torn.is_none() && state.journal_len() == Some(journal.len() as u64) && !state.is_settled());
    assert_eq!(content.targets, [json!({ "no": "export" }), entry("b", 7)]);
    assert_eq!(content.retired, [retired("a", 1)], "a number in use is not reserved");
}

#[test]
fn a_change_counts_however_the_list_writes_the_pool() {
    let mut files = Files::default();
    let listed = |pool: &str, image: &str| json!({ "pool": pool, "image": image, "front": "nbd" });
    let targets = vec![listed("rados:rbd", "a"), listed("rbd", "b"), listed("rbd", "")];
    files.replace(ListContent { targets: targets.clone(), retired: Vec::new() });
    let name = ExportName { front: "nbd".into(), pool: "rbd".into(), image: "a".into() };
    files.append(&[ExportChange { name, entries: Vec::new(), retired: None }]);
    assert_eq!(files.open().content.targets, targets[1..]);
}

#[test]
fn a_list_of_the_version_before_is_written_anew_and_has_no_journal() {
    let list = json!({ "version": 1, "targets": [entry("a", 1)] }).to_string();
    let stored = StoredList::<String>::decode(list.as_bytes()).expect("a list");
    assert!(!stored.has_journal());
    let Replayed { mut state, content, .. } =
        stored.replay(b"{\"generation\":0}\nrubbish\n[]\n", Some).expect("no journal");
    assert_eq!(content.targets, [entry("a", 1)]);
    assert!(state.wants_replacing() && state.is_settled());
    assert!(matches!(state.encode_changes::<String>(&[]), Err(ListError::NoJournal)));
    let list = state.encode_list(content, 17).expect("a list");
    state.replaced(&list);
    assert!(!state.wants_replacing() && list.generation == 17);
}

#[test]
fn damage_and_newer_versions_are_named() {
    let refused = |list: &str, journal: &str| replay(list.as_bytes(), journal.as_bytes()).expect_err("refused");
    let list = "{\"version\":2,\"generation\":1,\"targets\":[]}";
    assert!(matches!(refused("{\"version\":1,", ""), ListError::Damaged(_)));
    assert!(matches!(refused("{\"version\":2}", ""), ListError::Damaged(_)));
    assert!(matches!(refused("{\"version\":3,\"targets\":{}}", ""), ListError::Newer(3)));
    let damaged = |journal| match refused(list, journal) {
        ListError::DamagedJournal { line, .. } => line,
        other => panic!("{other}"),
    };
    assert_eq!(damaged("{\"generation\":1}\nrubbish\n[]\n"), 2);
    assert_eq!(damaged("rubbish\n[]\n"), 1);
    // The last line may be torn, and end in a line break of older content.
    let replayed = replay(list.as_bytes(), b"{\"generation\":1}\n[]\n[{\"fr\n").expect("torn");
    assert_eq!((replayed.torn.map(|torn| torn.line), replayed.state.journal_len()), (Some(3), Some(20)));
}

#[test]
fn an_append_of_unknown_outcome_asks_for_a_new_list() {
    let mut files = Files::default();
    files.replace(ListContent::default());
    assert!(files.state.is_settled() && !files.state.wants_replacing());
    files.append(&[attached("a", 1)]);
    files.state.append_unclear();
    assert!(!files.state.is_settled() && files.state.wants_replacing());
    assert!(matches!(files.state.encode_changes(&[attached("b", 2)]), Err(ListError::NoJournal)));
    files.replace(files.open().content);
    assert!(files.state.is_settled() && files.state.journal_len() == Some(0));
}

#[test]
fn a_journal_as_long_as_its_list_asks_for_a_new_list() {
    let mut files = Files::default();
    files.replace(ListContent::default());
    let mut changes = 0;
    while !files.state.wants_replacing() {
        files.append(&[attached("image", changes)]);
        changes += 1;
    }
    let len = files.journal.len() as u64;
    assert!(len > JOURNAL_MIN && len < JOURNAL_MIN + 1000, "{len} bytes");
}

/// Operation on the files.
#[derive(Debug, Clone)]
enum Step {
    Append(Vec<(u8, bool)>),
    Replace,
    /// Crash during an append.
    Crash(Vec<(u8, bool)>, prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let changes = || prop::collection::vec((0..6_u8, any::<bool>()), 1..4);
    let step = prop_oneof![
        4 => changes().prop_map(Step::Append),
        1 => Just(Step::Replace),
        2 => (changes(), any::<prop::sample::Index>()).prop_map(|(changes, cut)| Step::Crash(changes, cut)),
    ];
    prop::collection::vec(step, 1..30)
}

/// Plain model: the exports and the reserved numbers.
#[derive(Debug, Clone, Default)]
struct Model(BTreeMap<u8, Value>, Vec<RetiredNumber<String>>);

impl Model {
    fn apply(&mut self, changes: &[(u8, bool)]) -> Vec<Change> {
        let change = |&(image, attach): &(u8, bool)| {
            let (image_name, unit) = (format!("image{image}"), u32::from(image));
            if attach {
                self.0.insert(image, entry(&image_name, unit));
                self.1.retain(|kept| kept.unit != unit);
                return attached(&image_name, unit);
            }
            self.0.remove(&image);
            self.1.push(retired(&image_name, unit));
            detached(&image_name, unit)
        };
        changes.iter().map(change).collect()
    }

    fn content(&self) -> Content {
        ListContent { targets: self.0.values().cloned().collect(), retired: self.1.clone() }
    }
}

fn sorted(mut content: Content) -> Content {
    content.targets.sort_by_key(Value::to_string);
    content
}

proptest! {
    #[test]
    fn any_prefix_of_an_append_is_none_or_all_of_it(steps in steps()) {
        let mut files = Files::default();
        files.replace(ListContent::default());
        let mut model = Model::default();
        for step in steps {
            match step {
                Step::Append(changes) => files.append(&model.apply(&changes)),
                Step::Replace => files.replace(model.content()),
                Step::Crash(changes, cut) => {
                    let mut attempted = model.clone();
                    let changes = attempted.apply(&changes);
                    let before = files.state.journal_len().expect("a journal") as usize;
                    files.append(&changes);
                    let whole = files.journal.clone();
                    // Every seventh byte, beginning anywhere, so that many runs cut everywhere; and the last two.
                    let sampled = (before + cut.index(7)..whole.len() - 1).step_by(7);
                    for kept in sampled.chain(whole.len() - 1..=whole.len()) {
                        files.journal = whole[..kept].to_vec();
                        let found = sorted(files.open().content);
                        // The last byte is the line break: without it nothing was acknowledged.
                        let expected = if kept == whole.len() { &attempted } else { &model };
                        prop_assert_eq!(found, sorted(expected.content()), "{} of {} bytes", kept, whole.len());
                    }
                    let kept = before + cut.index(whole.len() + 1 - before);
                    files.journal = whole[..kept].to_vec();
                    files.state = files.open().state;
                    model = if kept == whole.len() { attempted } else { model };
                }
            }
            let Replayed { state, content, torn } = files.open();
            prop_assert!(torn.is_none());
            prop_assert_eq!(&state, &files.state);
            prop_assert_eq!(sorted(content), sorted(model.content()));
        }
    }
}

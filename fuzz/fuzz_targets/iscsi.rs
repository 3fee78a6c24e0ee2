#![no_main]

forebay_fuzz::targets! {
    "iscsi_login" => forebay_iscsi::fuzz::login,
    "iscsi_pdus" => forebay_iscsi::fuzz::pdus,
    "iscsi_texts" => forebay_iscsi::fuzz::texts,
}

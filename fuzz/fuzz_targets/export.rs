#![no_main]

forebay_fuzz::targets! {
    "export_list" => forebay_export::fuzz::list,
}
